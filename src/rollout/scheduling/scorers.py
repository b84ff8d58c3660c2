"""Where a reward function is called: on the loop, in a thread, or in a process."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rollout.chat.group import Group
from rollout.scheduling.reward_messages import Ask
from rollout.worker_threads import is_async

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.chat.trajectory import Trajectory
    from rollout.function_refs import FunctionRef
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.scheduling.reward_processes import RewardProcesses
    from rollout.worker_threads import WorkerThreads

S = TypeVar("S", contravariant=True)
A = TypeVar("A", covariant=True)


class Scorer(Protocol[S, A]):
    """Calls a reward function.

    Attributes:
        when_late: What becomes of a call that is cancelled, for messages.
    """

    when_late: str

    async def score(self, subject: S, begin: Callable[[], None]) -> A:
        """What the function says of a trajectory, or of a group; checked.

        Args:
            subject: What it is given.
            begin: Called when the call begins, after what it had to wait for.

        Raises:
            BadRewardError: It returned what is no reward.
            Exception: Whatever it raised.
        """
        ...


class LocalScorer(Scorer[S, A]):
    """Calls a function in this process: on the loop where it is async, else in a worker thread.

    Args:
        function: The user's.
        name: Of its threads.
        check: Makes of what it returns what is wanted.
        takes_sandbox: Whether it is called with a `sandbox` too; see `with_sandbox`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        check: Callable[[Any, S], A],
        threads: WorkerThreads,
        *,
        takes_sandbox: bool = False,
    ) -> None:
        self._function, self.takes_sandbox = function, takes_sandbox
        self._is_async = is_async(function)
        self._name = name
        self._check = check
        self._threads = threads
        self.when_late = "" if self._is_async else "; its thread is left behind"

    def with_sandbox(self, sandbox: TrajectorySandbox) -> LocalScorer[S, A]:
        """One that gives its function this sandbox."""
        other = copy.copy(self)
        other._function = functools.partial(self._function, sandbox=sandbox)
        return other

    async def score(self, subject: S, begin: Callable[[], None]) -> A:
        """See `Scorer`."""
        if self._is_async:
            begin()
            value = await self._function(subject)
        else:
            value = await self._threads.run(self._name, self._function, subject, begin=begin)
            if inspect.isawaitable(value):
                value = await value
        return self._check(value, subject)


class ProcessScorer(Scorer[Any, Any]):
    """Calls a function in a child process.

    Args:
        function: Where the process finds it.
        keywords: What it takes in the place of the trajectory, if anything.
    """

    when_late = "; its process was killed, and another one takes its place"

    def __init__(
        self,
        function: FunctionRef,
        processes: RewardProcesses,
        keywords: Callable[[Trajectory], dict[str, Any]] | None = None,
    ) -> None:
        self._function = function
        self._processes = processes
        self._keywords = keywords

    async def score(self, subject: Any, begin: Callable[[], None]) -> Any:
        """See `Scorer`."""

        def request() -> Ask:
            keywords = None if self._keywords is None else self._keywords(subject)
            return Ask.about(self._function, subject, keywords)

        rewards = await self._processes.ask(request, begin)
        return rewards if isinstance(subject, Group) else rewards[0]
