"""Finds the reward functions that a caller gave, checks them, and calls them in this process."""

from __future__ import annotations

import functools
import inspect
import re
from typing import TYPE_CHECKING, Any

import attrs

from rollout.errors import ConfigError
from rollout.function_refs import FunctionRef, NotImportableError, function_ref
from rollout.scheduling.rewards.signatures import (
    GroupRewardFunction,
    RewardForm,
    RewardFunction,
    check_group_reward,
    check_reward,
    make_verl_arguments,
)
from rollout.user_files import named_object
from rollout.worker_threads import is_async

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.worker_threads import WorkerThreads

_EXPECTED = "expected a function, or 'package.module:name'"
_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@attrs.frozen
class GivenRewards:
    """The functions that a caller gave, as they are; `load_rewards` looks at them.

    Attributes:
        single: Of a trajectory, or its name.
        group: Of a group, or its name.
    """

    single: RewardFunction | str | None = None
    group: GroupRewardFunction | str | None = None


@attrs.frozen
class LoadedReward:
    """A reward function that was found and checked.

    Attributes:
        what: "reward" or "group_reward".
        ref: Where child processes find it; None where none of them calls it.
        form: How a function of a trajectory is called.
    """

    function: Any
    what: str
    ref: FunctionRef | None = None
    form: RewardForm = attrs.field(factory=RewardForm)

    @property
    def runs_in_thread(self) -> bool:
        """Whether the call needs a thread; else it is awaited on the loop."""
        return bool(self.form.verl_names) or not is_async(self.function)

    async def call(
        self,
        subject: Any,
        begin: Callable[[], None],
        threads: WorkerThreads,
        tokenizer: Any,
        sandbox: TrajectorySandbox | None,
    ) -> Any:
        """Call the function in this process, and return what it returns.

        Args:
            subject: The trajectory, or the group.
            begin: Called when the call begins, after the wait for a thread.
            threads: Where sync functions run, and what verl's take is made; cancellation leaves
                the thread behind.
            tokenizer: Decodes the response for verl's functions.
            sandbox: Passed on, unless it is None.
        """
        function = self.function
        if sandbox is not None:
            function = functools.partial(function, sandbox=sandbox)
        if not self.runs_in_thread:
            begin()
            return await function(subject)

        def call() -> Any:
            if self.form.verl_names:
                return function(**make_verl_arguments(self.form.verl_names, subject, tokenizer))
            return function(subject)

        value = await threads.run(self.what, call, begin=begin)
        return await value if inspect.isawaitable(value) else value


@attrs.frozen
class RewardFunctions:
    """The functions of a runtime; None where there is none."""

    single: LoadedReward | None = None
    group: LoadedReward | None = None

    @property
    def needs_sandbox(self) -> bool:
        """Whether trajectories are rewarded by a look into their sandboxes."""
        return self.single is not None and self.single.form.takes_sandbox


def load_rewards(given: GivenRewards, processes: int) -> RewardFunctions:
    """Return the functions, once they are known to be callable where they are to be called.

    Args:
        given: What the caller gave.
        processes: `rewards.processes`.

    Raises:
        ConfigError: One cannot be called with a trajectory or a group, there is none of its name,
            or no process could import it.
    """
    single = None if given.single is None else _find(given.single, "reward")
    group = None if given.group is None else _find(given.group, "group_reward")
    if single is not None:
        single = attrs.evolve(single, form=check_reward(single.function))
    if group is not None:
        check_group_reward(group.function)
    if not processes:
        return RewardFunctions(single, group)
    if single is not None and single.form.takes_sandbox:
        raise ConfigError(
            f"reward: it names sandbox, which cannot leave this process; expected "
            f"rewards.processes = 0, not {processes}"
        )
    return RewardFunctions(
        None if single is None else _make_importable(single, processes),
        None if group is None else _make_importable(group, processes),
    )


def _find(given: Any, what: str) -> LoadedReward:
    """Return a function as it is, or the one that a ``"package.module:name"`` names."""
    if not isinstance(given, str) or ":" not in given:  # a text is refused like anything else
        return LoadedReward(given, what)
    if not _REFERENCE.fullmatch(given):
        raise ConfigError(f"{what} = {given!r:.200}: {_EXPECTED}")
    module, _, qualname = given.partition(":")
    ref = FunctionRef(module=module, file="", qualname=qualname)
    return LoadedReward(named_object(given, what, _EXPECTED), what, ref)


def _make_importable(loaded: LoadedReward, processes: int) -> LoadedReward:
    """Return the function with where child processes find it; refused where they cannot."""
    if loaded.ref is not None:
        return loaded
    try:
        return attrs.evolve(loaded, ref=function_ref(loaded.function))
    except NotImportableError as error:
        raise ConfigError(
            f"{loaded.what}: rewards.processes = {processes} {error}, or name it as "
            "'package.module:name'"
        ) from None
