"""One situation, run again with an injection at each of its checkpoints.

A situation is an async function that does what a trainer does, with a `Recorder` in the place of
`rollout.open_rollout`. `explore` runs it once and counts the steps of its tasks (a step leads from
one checkpoint to the next): under one schedule seed they are the same in every run. Then it runs it
again and again, and lets something happen just before step 1, before step 2, and so on. After each
run the invariants must hold, and nothing may be left.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import NamedTuple

import anyio
import trio

from harness.recorder import Recorder
from harness.watched_runtime import OPERATIONS
from rollout.engine.cores.simulated.stable import stable_share
from rollout.errors import RolloutError
from rollout.testing.ceiling import VirtualCeilingError
from rollout.testing.leaks import Belongings, leftovers
from rollout.testing.schedule import run_virtual

Situation = Callable[[Recorder], Awaitable[object]]

#: What `explore` can let happen:
#:
#: * "cancel": the caller of the situation is cancelled; before a runtime closes, the recorder waits
#:   until it is quiet, so that the accounts must balance to the token;
#: * "close": the same, but runtimes close at once, with requests still under way;
#: * "runtime_cancel": `runtime.cancel` is called on every runtime;
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
#: Virtual seconds after which a run is taken for hanging.
_CEILING_S = 2000.0
#: Races that the error of `explore` spells out.
_SHOWN = 10
#: Turns of the loop that tasks which are ending get to do so.
_SETTLE_TURNS = 10


class Exploration(NamedTuple):
    """What `explore` did: steps of the undisturbed run by injection, and runs with an injection."""

    steps: Mapping[str, int]
    runs: int


class RacesFoundError(AssertionError):
    """Injections broke invariants; `races` has them all."""

    def __init__(self, races: Sequence[RaceRun], runs: int) -> None:
        self.races = tuple(races)
        more = len(races) - _SHOWN
        super().__init__(
            f"{len(races)} of {runs} runs broke an invariant:\n"
            + "\n".join(map(str, races[:_SHOWN]))
            + (f"\nand {more} more" if more > 0 else "")
        )


def explore(
    situation: Situation,
    *,
    injections: Sequence[str] = INJECTIONS,
    share: float = 1.0,
    seed: int = 0,
) -> Exploration:
    """Run `situation` with every injection at every step of it.

    Args:
        situation: Opens its runtimes through the `Recorder` that it is given, and does nothing but
            wait for what is virtual: no threads, sockets or processes.
        injections: Some of `INJECTIONS`.
        share: How many of all runs are made, rounded up; `seed` chooses them. 1 makes them all.
        seed: The schedule seed.

    Raises:
        RacesFoundError: Some runs broke an invariant, each with the call of `replay` that shows it
            again; or the undisturbed run did.
    """
    steps = {name: _run_undisturbed(situation, name, seed) for name in injections}
    every = [(name, step) for name in injections for step in range(1, len(steps[name]) + 1)]
    chosen = sorted(every, key=lambda run: stable_share(seed, *run))[: ceil(share * len(every))]
    races = []
    for name, step in chosen:
        run = RaceRun(situation, name, seed, step=step, expected=steps[name][step - 1])
        if run.anomalies:
            races.append(run)
    if races:
        raise RacesFoundError(races, len(chosen))
    return Exploration({name: len(steps[name]) for name in injections}, len(chosen))


def replay(situation: Situation, injection: str, *, step: int, seed: int = 0) -> list[str]:
    """The anomalies of one run of `explore`, alone."""
    expected = _run_undisturbed(situation, injection, seed)[step - 1]
    return RaceRun(situation, injection, seed, step=step, expected=expected).anomalies


def _run_undisturbed(situation: Situation, injection: str, seed: int) -> list[str]:
    """Names of the tasks that make the steps while nothing is injected."""
    run = RaceRun(situation, injection, seed)
    if run.anomalies:
        raise RacesFoundError([run], 1)
    return run.steps


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
        self, situation: Situation, injection: str, seed: int, *, step: int = 0, expected: str = ""
    ) -> None:
        self.anomalies: list[str] = []
        self.steps: list[str] = []
        self.injection = injection
        self.step = step
        self.seed = seed
        self._situation = situation
        self._expected = expected
        self._recorder = Recorder(closes_at_once=injection == "close")
        before = Belongings()
        with _silence_logs():
            try:
                run_virtual(self._main, seed=seed, ceiling_s=_CEILING_S)
            except VirtualCeilingError as error:
                self.anomalies.append(str(error))
                return
        self.anomalies += self._recorder.anomalies()
        self.anomalies += [f"left behind: {text}" for text in leftovers(before)]

    def __str__(self) -> str:
        again = f"replay(situation, {self.injection!r}, step={self.step}, seed={self.seed})"
        return again + "".join(f"\n    {text}" for text in self.anomalies)

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
        for _ in range(_SETTLE_TURNS):
            await anyio.lowlevel.checkpoint()
        left = [task for task in anyio.get_running_tasks() if task.id not in before]
        self.anomalies += [f"left behind: task {task.name}" for task in left]

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
                runtime.cancel_if_open(reason="injected")
        elif self.injection in _ENGINE_FAULTS:
            alive = self._recorder.engines_alive()
            if alive:
                getattr(alive[self.step % len(alive)], _ENGINE_FAULTS[self.injection])()
        elif self.injection in OPERATIONS:
            for runtime in self._recorder.runtimes[-1:]:
                runtime.request_operation(self.injection)
        else:
            assert self.injection == "tool_error", self.injection
            self._recorder.fault_injector.is_armed = True


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
        self.names.append(task.name)
        if len(self.names) == self._at:
            try:
                self._act(task.name)
            except Exception as error:
                self.failure = error


@contextmanager
def _silence_logs() -> Iterator[None]:
    """Failures that are meant to happen are not worth a line each."""
    logger = logging.getLogger("rollout")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
