"""Tools marked for asyncio: on either backend they run on an asyncio loop, and hear of its end."""

from __future__ import annotations

import asyncio  # noqa: TID251  (what such tools are written for)
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

import executors
from rollout.tools import ToolResult, TrajectoryTools, function_tool
from rollout.worker_threads import WorkerThreads

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[WorkerThreads]:
    pool = WorkerThreads(max_threads=4, max_abandoned=2)
    yield pool
    pool.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "rollout-asyncio" not in names


def opened(threads: WorkerThreads, *tools: Any, tool_s: float = 60.0) -> TrajectoryTools:
    return executors.executor_of(tools, threads, tool_s=tool_s).open_session(uid="p", member=0)


async def run(tools: TrajectoryTools, *names: str) -> list[ToolResult]:
    return await executors.run(tools, *map(executors.call, names))


async def test_asyncio_tool_runs_on_an_asyncio_loop_and_calls_meet(threads: WorkerThreads) -> None:
    met = 0
    all_met: asyncio.Event | None = None

    @function_tool(backend="asyncio")
    async def meet() -> str:
        """Meet the other call."""
        nonlocal met, all_met
        all_met = all_met or asyncio.Event()
        met += 1
        if met == 2:
            all_met.set()
        await all_met.wait()
        return await asyncio.to_thread(lambda: "met")

    tools = opened(threads, meet)
    assert await run(tools, "meet", "meet") == [ToolResult("met"), ToolResult("met")]


async def test_asyncio_tool_past_its_limit_is_cancelled_on_its_loop(threads: WorkerThreads) -> None:
    ended = threading.Event()

    @function_tool(backend="asyncio")
    async def hang() -> None:
        """Never return."""
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    tools = opened(threads, hang, tool_s=0.05)
    assert await run(tools, "hang") == [
        ToolResult("timed out after 0.05 s (limits.tool_s)", is_error=True)
    ]
    assert ended.is_set()


async def test_asyncio_tool_hears_of_the_callers_cancellation(threads: WorkerThreads) -> None:
    running, ended = threading.Event(), threading.Event()

    @function_tool(backend="asyncio")
    async def hang() -> None:
        """Never return."""
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
            raise

    tools = opened(threads, hang)
    async with anyio.create_task_group() as group:
        group.start_soon(run, tools, "hang")
        assert await anyio.to_thread.run_sync(running.wait, 30)
        group.cancel_scope.cancel()
    assert ended.is_set()
    assert threads.abandoned == {}


async def test_asyncio_tool_that_fails_is_an_error_result_and_the_loop_goes_on(
    threads: WorkerThreads,
) -> None:
    @function_tool(backend="asyncio")
    async def exits() -> None:
        """Exit."""
        await asyncio.sleep(0)
        raise SystemExit(3)

    @function_tool(backend="asyncio")
    async def cancels() -> None:
        """Await a cancelled task."""
        inner = asyncio.ensure_future(asyncio.sleep(60))
        inner.cancel()
        await inner

    @function_tool(backend="asyncio")
    async def fine() -> str:
        """Answer."""
        return "fine"

    tools = opened(threads, exits, cancels, fine)
    results = await run(tools, "exits", "cancels", "fine")
    assert [result.is_error for result in results] == [True, True, False]
    assert await run(tools, "fine") == [ToolResult("fine")]


async def test_asyncio_tool_that_ignores_its_cancellation_is_abandoned_and_counted(
    threads: WorkerThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_cleanup_s", 0.05)
    release = threading.Event()

    @function_tool(backend="asyncio")
    async def stubborn() -> None:
        """Go on."""
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    tools = opened(threads, stubborn, tool_s=0.05)
    assert (await run(tools, "stubborn"))[0].is_error
    assert threads.abandoned == {"stubborn": 1}
    release.set()
    with anyio.fail_after(30):
        while threads.abandoned:
            await anyio.sleep(0.01)
