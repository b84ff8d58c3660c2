"""How a reward function wants to be called: with a trajectory, or as verl calls its own."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rollout.errors import ConfigError
from rollout.types import Reward
from rollout.worker_threads import is_async

if TYPE_CHECKING:
    from rollout.chat.group import Group
    from rollout.chat.trajectory import Trajectory

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
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
EXPECTED = (
    "expected reward(trajectory) -> float | Reward, async reward(trajectory, sandbox), or verl's "
    f"compute_score({', '.join(VERL_ARGUMENTS)})"
)
EXPECTED_OF_GROUP = (
    "expected group_reward(group) -> a sequence of float | Reward | None, one for each member"
)


@attrs.frozen
class RewardForm:
    """How a function of a trajectory is called.

    Attributes:
        verl_names: Which of `VERL_ARGUMENTS` it takes; none where it takes a trajectory.
        takes_sandbox: Whether it is called with the trajectory's sandbox too.
    """

    verl_names: tuple[str, ...] = ()
    takes_sandbox: bool = False


def check_reward(function: Any, what: str = "reward") -> RewardForm:
    """Return how a function is called that takes a trajectory, or what verl's functions take.

    One whose signature cannot be known passes too: some written in C have none.

    Args:
        what: Where it was given, for the message.

    Raises:
        ConfigError: It is no function, or of another signature; says what it is.
    """
    signature, form, fault = _read_signature(function), RewardForm(), _find_fault(function)
    if isinstance(function, str):
        fault = "cannot be called; a function's name is written 'package.module:name'"
    if signature is not None and not fault:
        form = _find_form(signature)
        if form.verl_names:
            missing = [
                name
                for name, parameter in signature.parameters.items()
                if parameter.default is parameter.empty
                and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
                and name not in form.verl_names
            ]
            fault = f"takes {', '.join(missing)} too, which nobody gives" if missing else ""
        elif "completions" in signature.parameters:
            fault = "is called with lists by TRL's trainer, here with one trajectory at a time"
        elif form.takes_sandbox:
            if not _binds(signature, object(), sandbox=object()):
                fault = "cannot be called with one trajectory and its sandbox"
            elif not is_async(function):
                fault = "names sandbox, whose methods are awaited, and is not async"
        elif not _binds(signature, object()):
            fault = "cannot be called with one trajectory"
    if fault:
        raise ConfigError(f"{what} = {_show_function(function)}: {fault}; {EXPECTED}")
    return form


def check_group_reward(function: Any, what: str = "group_reward") -> None:
    """Check that a function can be called with a group; see `check_reward`.

    Raises:
        ConfigError: It is no function, or of another signature; says what it is.
    """
    signature, fault = _read_signature(function), _find_fault(function)
    if signature is not None and not fault:
        if _find_form(signature).takes_sandbox:
            fault = "names sandbox, and the members of a group have none any more: use reward"
        elif not _binds(signature, object()):
            fault = "cannot be called with one group"
    if fault:
        raise ConfigError(f"{what} = {_show_function(function)}: {fault}; {EXPECTED_OF_GROUP}")


def _find_form(signature: inspect.Signature) -> RewardForm:
    parameters = signature.parameters
    # No function of a trajectory has a solution_str.
    is_verl = "solution_str" in parameters or (
        not _binds(signature, object()) and _binds(signature, **dict.fromkeys(VERL_ARGUMENTS))
    )
    if is_verl:
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return RewardForm(VERL_ARGUMENTS)
        taken = {p.name for p in parameters.values() if p.kind is not p.POSITIONAL_ONLY}
        return RewardForm(tuple(name for name in VERL_ARGUMENTS if name in taken))
    sandbox = parameters.get(SANDBOX)
    if sandbox is None or sandbox.kind not in _BY_KEYWORD:
        return RewardForm()
    is_first = next(iter(parameters)) == SANDBOX
    return RewardForm(takes_sandbox=sandbox.kind is sandbox.KEYWORD_ONLY or not is_first)


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


def _find_fault(function: Any) -> str:
    """Say why it is no function that returns something; empty where it is one."""
    if isinstance(function, type) and not issubclass(function, Reward | int | float):
        return "a class, not one of its objects"
    if not callable(function):
        return "cannot be called"
    call = getattr(function, "__call__", function)  # noqa: B004  (the method itself is wanted)
    yields = any(
        inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each)
        for each in (function, call)
    )
    return "yields, and does not return" if yields else ""


def _read_signature(function: Any) -> inspect.Signature | None:
    """None where there is none to be read."""
    if not callable(function):
        return None
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _show_function(function: Any) -> str:
    """A function as it would be written in its ``def``; other things as they show themselves."""
    signature = _read_signature(function)
    name = getattr(function, "__name__", None) or type(function).__name__
    if signature is None or isinstance(function, type):
        return f"{function!r:.200}"
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=bare, return_annotation=signature.empty)}"
