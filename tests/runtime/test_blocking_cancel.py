"""Blocking calls that are given up before the runtime's loop has begun them."""

from __future__ import annotations

import asyncio  # noqa: TID251  (a task of the user's is cancelled)
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

import rollout
from rollout import BlockingRollout, ConfigError, Prompt, open_rollout_blocking
from rollout.testing import Scenario

BACKENDS = ["trio", "asyncio"]
SCENARIO = Scenario(seed=1).reply("one", "ok").reply("other", "ok")
OTHER = Prompt(messages=[{"role": "user", "content": "other"}], uid="other")

entered, released = threading.Event(), threading.Event()


@rollout.register_agent("holding")
class HoldsTheLoop(rollout.AgentLoop):
    """Blocks the runtime's loop: what is posted meanwhile begins after `released`."""

    async def run(self, context: rollout.AgentContext) -> None:
        entered.set()
        released.wait()
        await context.generate()


@contextmanager
def held_loop(runtime: BlockingRollout) -> Iterator[None]:
    """A runtime whose loop begins nothing in the block, until `released` is set."""
    entered.clear()
    released.clear()
    held = Prompt(messages=[{"role": "user", "content": "one"}], uid="one", agent_name="holding")
    holder = threading.Thread(target=runtime.generate, args=([held],))
    holder.start()
    entered.wait()
    try:
        yield
    finally:
        released.set()
        holder.join()


@pytest.fixture(params=BACKENDS)
def runtime(request: pytest.FixtureRequest) -> Iterator[BlockingRollout]:
    with open_rollout_blocking(SCENARIO.config(), backend=request.param) as runtime:
        yield runtime


@pytest.mark.parametrize("backend", BACKENDS)
def test_agenerate_cancelled_before_it_begins_runs_nothing(
    runtime: BlockingRollout, backend: str
) -> None:
    async def main() -> bool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release_once_blocked)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await runtime.agenerate([OTHER])
        return scope.cancelled_caught

    async def release_once_blocked() -> None:
        await anyio.wait_all_tasks_blocked()  # the call is given up by then
        released.set()

    admitted = runtime.statistics().admitted
    with held_loop(runtime):
        assert anyio.run(main, backend=backend)
    assert runtime.statistics().admitted == admitted + 1  # the one that held the loop
    assert runtime.generate([OTHER]).trajectories[0].answer == "ok"


def test_agenerate_of_a_cancelled_asyncio_task_runs_nothing(runtime: BlockingRollout) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(runtime.agenerate([OTHER]))
        await anyio.wait_all_tasks_blocked()  # it waits for the loop that is held
        task.cancel()
        released_soon = threading.Timer(0.05, released.set)
        released_soon.start()
        with pytest.raises(asyncio.CancelledError):
            await task
        released_soon.join()

    admitted = runtime.statistics().admitted
    with held_loop(runtime):
        anyio.run(main, backend="asyncio")
    runtime.generate([OTHER])
    assert runtime.statistics().admitted == admitted + 2  # the one that held the loop, and this


def call_stream(runtime: BlockingRollout) -> None:
    with runtime.stream([OTHER]) as trajectories:
        next(trajectories)


def call_stream_groups(runtime: BlockingRollout) -> None:
    with runtime.stream_groups([OTHER]) as groups:
        next(groups)


CALLS: list[Callable[[BlockingRollout], Any]] = [
    lambda runtime: runtime.generate([OTHER]),
    lambda runtime: runtime.collect([OTHER], 1),
    call_stream,
    call_stream_groups,
    lambda runtime: runtime.cancel("one"),
]


@contextmanager
def ctrl_c_soon() -> Iterator[None]:
    """In the block the main thread gets a KeyboardInterrupt; the loop is released after it."""

    timer = threading.Timer(0.05, released.set)

    def interrupt(_number: int, _frame: object) -> None:
        timer.start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if timer.ident is not None:
            timer.join()  # else it would release the next one


def test_blocking_call_interrupted_before_it_begins_runs_nothing(runtime: BlockingRollout) -> None:
    for count, call in enumerate(CALLS, start=1):
        with held_loop(runtime), ctrl_c_soon(), pytest.raises(KeyboardInterrupt):
            call(runtime)
        statistics = runtime.statistics()
        assert (statistics.admitted, statistics.running) == (count, 0)  # those that held the loop
        assert statistics.outcomes == {"completed": count}
    assert runtime.generate([OTHER]).trajectories[0].answer == "ok"


@pytest.mark.parametrize("backend", ["uvloop", None])
def test_open_rollout_blocking_unknown_backend_is_refused_before_engines_start(
    backend: Any,
) -> None:
    threads = threading.enumerate()
    with pytest.raises(ConfigError, match=r"backend = .*: expected 'trio' or 'asyncio'") as caught:
        open_rollout_blocking(SCENARIO.config(), backend=backend)
    assert f"backend = {backend!r}" in str(caught.value)
    assert threading.enumerate() == threads
