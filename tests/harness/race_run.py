"""One run of a situation, with something that happens just before one of its steps."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import trio

from harness.recorder import Recorder
from harness.replica_operations import OPERATIONS
from rollout.errors import RolloutError
from rollout.testing.ceiling import VirtualCeilingError
from rollout.testing.leaks import Belongings, leftovers
from rollout.testing.schedule import run_virtual

if TYPE_CHECKING:
    from collections.abc import Iterator

Situation = Callable[[Recorder], Awaitable[object]]

#: What `explore` can let happen:
#:
#: * "cancel": the caller of the situation is cancelled; before a runtime closes, the recorder waits
#:   until it is quiet, so that the accounts must balance to the token;
#: * "close": the same, but runtimes close at once, with requests still under way;
#: * "runtime_cancel": `RolloutRuntime.cancel` is called on every runtime;
#: * "engine_death": one engine dies (with several, the steps take turns);
#: * "engine_broken": an engine says so in place of the next thing that it has to say;
#: * "engine_freeze": an engine says nothing any more;
#: * "replica_drain", "replica_add", "replica_remove", "new_weights": somebody does this beside what
#:   continues; a replica is drained for half a second, and one that is removed has as long;
#: * "tool_error": the next answer of a tool or of a simulated user is an exception.
INJECTIONS = (
    "cancel",
    "close",
    "runtime_cancel",
    "engine_death",
    "engine_broken",
    "engine_freeze",
    *OPERATIONS,
    "tool_error",
)
_ENGINE_FAULTS = {"engine_death": "kill", "engine_broken": "break_down", "engine_freeze": "freeze"}
#: Reason that "runtime_cancel" gives.
REASON = "injected"
#: Turns of the loop that tasks which are ending get to do so.
_SETTLE_TURNS = 10


class RaceRun:
    """One run of a situation with one injection.

    Args:
        step: Before which it happens, counted from 1; 0: it does not.
        expected: Name of the task whose step that is.

    Attributes:
        steps: Names of the tasks that made its steps, in order.
        anomalies: What was wrong.
    """

    def __init__(
        self,
        situation: Situation,
        injection: str,
        seed: int,
        ceiling_s: float,
        *,
        step: int = 0,
        expected: str = "",
    ) -> None:
        self.anomalies: list[str] = []
        self.steps: list[str] = []
        self._situation = situation
        self.injection = injection
        self.step = step
        self.seed = seed
        self._expected = expected
        self._recorder = Recorder(closes_at_once=injection == "close")
        before = Belongings()
        with _quiet_logs():
            try:
                run_virtual(self._main, seed=seed, ceiling_s=ceiling_s)
            except VirtualCeilingError as error:
                self.anomalies.append(str(error))
                return
        self.anomalies += self._recorder.anomalies()
        self.anomalies += [f"left behind: {text}" for text in leftovers(before)]

    async def _main(self) -> None:
        before = {task.id for task in anyio.get_running_tasks()}
        with anyio.CancelScope() as scope:
            hook = _StepHook(self.step, lambda task: self._inject(scope, task))
            trio.lowlevel.add_instrument(hook)
            try:
                await self._situation(self._recorder)
            except Exception as error:
                if not self._may_raise(error):
                    self.anomalies.append(f"the situation raised {error!r}")
            finally:
                trio.lowlevel.remove_instrument(hook)
        self.steps = hook.names
        if hook.failure is not None:
            raise hook.failure
        await self._refuse_tasks_beside(before)

    def _may_raise(self, error: Exception) -> bool:
        """Whether the injection is reason enough for the library to raise this."""
        if isinstance(error, ExceptionGroup):  # of the situation's own task groups
            return all(self._may_raise(inner) for inner in error.exceptions)
        is_of_engines = self.injection in _ENGINE_FAULTS or self.injection in OPERATIONS
        return is_of_engines and isinstance(error, RolloutError)

    def _inject(self, scope: anyio.CancelScope, task: str) -> None:
        if task != self._expected:
            self.anomalies.append(
                f"the situation is not deterministic: step {self.step} is one of {task}; it was "
                f"one of {self._expected} when nothing was injected"
            )
        if self.injection in ("cancel", "close"):
            for call in self._recorder.calls_under_way():
                call.cancelled_at = anyio.current_time()
            scope.cancel()
        elif self.injection == "runtime_cancel":
            for runtime in self._recorder.runtimes:
                runtime.cancel_if_open(reason=REASON)
        elif self.injection in _ENGINE_FAULTS:
            alive = self._recorder.engines_alive()
            if alive:
                getattr(alive[self.step % len(alive)], _ENGINE_FAULTS[self.injection])()
        elif self.injection in OPERATIONS:
            for runtime in self._recorder.runtimes[-1:]:
                runtime.request_operation(self.injection)
        elif self.injection == "tool_error":
            self._recorder.fault_injector.is_armed = True

    async def _refuse_tasks_beside(self, before: set[int]) -> None:
        left: list[Any] = []
        for _ in range(_SETTLE_TURNS):
            left = [task for task in anyio.get_running_tasks() if task.id not in before]
            if not left:
                return
            await anyio.lowlevel.checkpoint()
        self.anomalies += [f"left behind: task {task.name}" for task in left]


class _StepHook(trio.abc.Instrument):
    """Notes the steps of all tasks, and acts just before one of them.

    Attributes:
        names: Of the tasks that made the steps so far.
        failure: What the action raised: trio would only log it.
    """

    def __init__(self, at: int, act: Callable[[str], None]) -> None:
        self.names: list[str] = []
        self.failure: Exception | None = None
        self._at = at
        self._act = act

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """See `trio.abc.Instrument`."""
        self.names.append(task.name)
        if len(self.names) != self._at:
            return
        try:
            self._act(task.name)
        except Exception as error:
            self.failure = error


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Failures that are meant to happen are not worth a line each."""
    logger = logging.getLogger("rollout")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
