"""Worker threads and foreign futures."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future

import anyio
import pytest

from rollout.bridge import loop_poster, wait_future
from rollout.errors import ToolError
from rollout.worker_threads import WorkerThreads

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both backends, in real time: threads are real."""
    return str(request.param)


async def test_run_system_exit_in_thread_becomes_tool_error() -> None:
    def leave() -> None:
        raise SystemExit(3)

    threads = WorkerThreads(max_threads=2, max_abandoned=1)
    with pytest.raises(ToolError, match=r"^leave: raised SystemExit in its thread$"):
        await threads.run("leave", leave)
    threads.close()


async def test_run_cancelled_thread_is_abandoned_counted_and_forgotten_when_it_ends() -> None:
    threads = WorkerThreads(max_threads=1, max_abandoned=1)
    release = threading.Event()
    with anyio.move_on_after(0.01):
        await threads.run("stuck", release.wait)
    assert threads.abandoned == {"stuck": 1}
    # Its place in the pool is free again, and its name fails fast.
    assert await threads.run("other", lambda: 1) == 1
    with pytest.raises(ToolError) as caught:
        await threads.run("stuck", release.wait)
    assert str(caught.value) == (
        "stuck: 1 abandoned threads are still running (tools.max_abandoned_threads = 1); not called"
    )
    release.set()
    with anyio.fail_after(5):
        while threads.abandoned:
            await anyio.lowlevel.checkpoint()
    assert await threads.run("stuck", release.wait) is True
    threads.close()


async def test_idle_thread_keeps_nothing_of_its_last_call() -> None:
    class Given:
        """What a function is called with."""

    threads = WorkerThreads(max_threads=1, max_abandoned=1)
    given = Given()
    left = weakref.ref(given)
    await threads.run("look", repr, given)
    del given
    with anyio.fail_after(5):
        while left() is not None:
            await anyio.lowlevel.checkpoint()
    threads.close()


async def test_run_more_calls_than_threads_wait_their_turn() -> None:
    threads = WorkerThreads(max_threads=2, max_abandoned=1)
    active, most = 0, 0
    lock = threading.Lock()
    gate = threading.Barrier(2, timeout=5)

    def work() -> None:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        gate.wait()
        with lock:
            active -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(threads.run, "work", work)
    assert most == 2
    threads.close()


async def test_wait_future_set_by_foreign_thread_returns_its_result() -> None:
    future: Future[int] = Future()
    threading.Thread(target=future.set_result, args=(7,)).start()
    assert await wait_future(future) == 7


def test_loop_poster_after_the_loop_has_ended_drops_the_callback() -> None:
    for backend in ("trio", "asyncio"):
        post = anyio.run(_make_poster, backend=backend)
        post(lambda: pytest.fail("ran after the end"))


async def _make_poster():  # type: ignore[no-untyped-def]
    return loop_poster()
