"""Reward functions: found by their names, checked, and called in this process.

A function takes a trajectory, a trajectory and its sandbox, or what verl gives to a
``compute_score``; the names of its parameters tell which.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rollout.errors import ConfigError
from rollout.types import Reward
from rollout.user_code import (
    FunctionRef,
    NotImportableError,
    describe_function,
    function_ref,
    named_object,
)
from rollout.worker_threads import is_async

if TYPE_CHECKING:
    from rollout.chat.trajectory import Group, Trajectory

RewardValue = float | Reward | Mapping[str, Any]
#: Takes a trajectory, or what verl gives to its functions.
RewardFunction = Callable[..., RewardValue | Awaitable[RewardValue]]
#: What a function of a group returns: one for each member, in their order.
GroupRewardValue = Sequence[RewardValue | None]
#: Takes a group whose wanted members have ended.
GroupRewardFunction = Callable[["Group"], GroupRewardValue | Awaitable[GroupRewardValue]]

#: What verl gives to a ``compute_score``, always by keyword.
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
#: What a function names that looks into the trajectory's sandbox; passed by keyword.
SANDBOX = "sandbox"
EXPECTED = (
    "expected reward(trajectory) -> float | Reward, async reward(trajectory, sandbox), or verl's "
    f"compute_score({', '.join(VERL_ARGUMENTS)})"
)
EXPECTED_OF_GROUP = (
    "expected group_reward(group) -> a sequence of float | Reward | None, one for each member"
)
#: What the functions are called in `open_rollout`, in messages and counts, and the reasons of
#: trajectories whose reward is not known.
SINGLE, GROUP = "reward", "group_reward"


@attrs.frozen
class GivenRewards:
    """The functions that a caller passes, or their names; `load_rewards` checks them.

    Attributes:
        single: Of a trajectory.
        group: Of a group.
    """

    single: RewardFunction | str | None = None
    group: GroupRewardFunction | str | None = None


@attrs.frozen
class LoadedReward:
    """A reward function that was found and checked.

    Attributes:
        what: "reward" or "group_reward".
        verl_names: Which of `VERL_ARGUMENTS` it takes; none where it takes a trajectory or a group.
        takes_sandbox: Whether it is called with the trajectory's sandbox too.
        ref: Where child processes find it; None where none of them calls it.
        processes: The `RewardProcesses` that call it in place of this process; None: it runs here.
    """

    function: Any
    what: str
    verl_names: tuple[str, ...] = ()
    takes_sandbox: bool = False
    ref: FunctionRef | None = None
    processes: Any = None

    @property
    def is_group(self) -> bool:
        """Whether it takes a group."""
        return self.what == GROUP

    @property
    def runs_in_thread(self) -> bool:
        """Whether the call needs a thread; else it is awaited on the loop."""
        return bool(self.verl_names) or not is_async(self.function)

    def call_in_thread(self, subject: Any, tokenizer: Any) -> Any:
        """Call the function; the tokenizer decodes the response for one written for verl."""
        if self.verl_names:
            return self.function(**make_verl_arguments(self.verl_names, subject, tokenizer))
        return self.function(subject)


def load_rewards(
    given: GivenRewards, processes: int
) -> tuple[LoadedReward | None, LoadedReward | None]:
    """Return the function of a trajectory and that of a group, once they are known to be callable.

    Args:
        given: What the caller passed.
        processes: `rewards.processes`.

    Raises:
        ConfigError: One cannot be called with a trajectory or a group, there is none of its name,
            or no process could import it.
    """
    single = _load(given.single, processes)
    if processes and single is not None and single.takes_sandbox:
        raise ConfigError(
            f"reward: it names sandbox, which cannot leave this process; expected "
            f"rewards.processes = 0, not {processes}"
        )
    return single, _load(given.group, processes, is_group=True)


def _load(given: Any, processes: int, *, is_group: bool = False) -> LoadedReward | None:
    if given is None:
        return None
    what = GROUP if is_group else SINGLE
    if isinstance(given, str) and ":" in given:  # any other text is refused below
        source, _, name = given.rpartition(":")
        function = named_object(given, what, "expected a function, or 'package.module:name'")
        loaded = check_reward(function, is_group=is_group)
        file = os.path.abspath(source) if source.endswith(".py") else ""
        return attrs.evolve(loaded, ref=FunctionRef("" if file else source, file, name))
    loaded = check_reward(given, is_group=is_group)
    try:
        return attrs.evolve(loaded, ref=function_ref(given)) if processes else loaded
    except NotImportableError as error:
        raise ConfigError(
            f"{what}: rewards.processes = {processes} {error}, or name it as 'package.module:name'"
        ) from None


def check_reward(function: Any, where: str = "", *, is_group: bool = False) -> LoadedReward:
    """Find out how a function of a trajectory, or of a group, wants to be called.

    One whose signature cannot be known passes too: some written in C have none.

    Args:
        where: Where it was passed, for the message; its name in `open_rollout` by default.

    Raises:
        ConfigError: It is no function, or of another signature; says what it is.
    """
    what, fault = GROUP if is_group else SINGLE, _find_fault(function)
    loaded = LoadedReward(function, what)
    if not fault:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return loaded
        loaded, fault = _read_signature(loaded, signature)
    if fault:
        expected = EXPECTED_OF_GROUP if is_group else EXPECTED
        raise ConfigError(f"{where or what} = {describe_function(function)}: {fault}; {expected}")
    return loaded


def _find_fault(function: Any) -> str:
    """Say why it is no function that returns something; empty where it is one."""
    if isinstance(function, str):
        return "cannot be called; a function's name is written 'package.module:name'"
    if isinstance(function, type) and not issubclass(function, Reward | int | float):
        return "a class, not one of its objects"
    if not callable(function):
        return "cannot be called"
    for each in (function, function.__call__):
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            return "yields, and does not return"
    return ""


def _read_signature(loaded: LoadedReward, signature: inspect.Signature) -> tuple[LoadedReward, str]:
    """Find out how a function is called, and why it cannot be; empty where it can."""
    names_sandbox = SANDBOX in list(signature.parameters)[1:]  # beside what it is about
    if loaded.is_group and names_sandbox:
        return loaded, "names sandbox, and the members of a group have none any more: use reward"
    if loaded.is_group:
        return loaded, _find_mismatch(signature, "one group", None)
    names = _find_verl_names(signature)
    if names:
        loaded = attrs.evolve(loaded, verl_names=names)
        return loaded, _find_mismatch(signature, ", ".join(names), **dict.fromkeys(names))
    if "completions" in signature.parameters:
        return loaded, "is called with lists by TRL's trainer, here with one trajectory at a time"
    if not names_sandbox:
        return loaded, _find_mismatch(signature, "one trajectory", None)
    loaded = attrs.evolve(loaded, takes_sandbox=True)
    if not is_async(loaded.function):
        return loaded, "names sandbox, whose methods are awaited, and is not async"
    return loaded, _find_mismatch(signature, "one trajectory and its sandbox", None, sandbox=None)


def _find_verl_names(signature: inspect.Signature) -> tuple[str, ...]:
    """Which of `VERL_ARGUMENTS` a function takes; none where it is not written for verl."""
    parameters = signature.parameters
    if "solution_str" not in parameters:  # no function of a trajectory has one
        is_verl = _find_mismatch(signature, "", None) and not _find_mismatch(
            signature, "", **dict.fromkeys(VERL_ARGUMENTS)
        )
        if not is_verl:
            return ()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return tuple(name for name in VERL_ARGUMENTS if takes_all or name in parameters)


def _find_mismatch(signature: inspect.Signature, subject: str, *args: Any, **named: Any) -> str:
    """Say why a function cannot be called with these arguments; empty where it can."""
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        return f"cannot be called with {subject}: {error}"
    return ""


def make_verl_arguments(
    names: Sequence[str], trajectory: Trajectory, tokenizer: Any
) -> dict[str, Any]:
    """Make what a function that was written for verl is called with.

    The prompt's `data_source` and `ground_truth`, the response as text without special tokens,
    tools' and users' words included, and as `extra_info` the trajectory's `extra` with `num_turns`,
    `turn_scores` and `tool_rewards`.
    """
    prompt, transcript = trajectory.prompt, trajectory.transcript
    stop = len(transcript) - transcript.trailing_observation_length
    ids = transcript.ids()[transcript.prompt_length : stop].tolist()
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    values = {
        "data_source": None if prompt is None else prompt.data_source,
        "solution_str": text,
        "ground_truth": None if prompt is None else prompt.ground_truth,
        "extra_info": {
            **trajectory.extra,
            "num_turns": trajectory.num_turns,
            "turn_scores": list(trajectory.turn_scores),
            "tool_rewards": list(trajectory.tool_rewards),
            "rollout_reward_scores": {"user_turn_rewards": list(trajectory.turn_scores)},
        },
    }
    return {name: values[name] for name in names}
