"""Engines in real child processes behind real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from pools import generate, make_pool
from rollout.engine.placement.engine_process import LastOutput
from rollout.engine.placement.local_process import LocalProcess
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.pool.request_runner import RecoveryPolicy
from rollout.errors import EngineError
from slow_cases import slow_after

pytestmark = [pytest.mark.anyio, pytest.mark.process]
HERE = Path(__file__).parent


@pytest.fixture(params=slow_after(1, ["trio", "asyncio"]))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both backends, in real time."""
    return str(request.param)


def children() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "rollout.engine.channel.child" in process.as_dict(["cmdline"], ad_value=[])["cmdline"]
    ]


def pool_of(
    core: str = "CountingCore",
    replicas: int = 1,
    policy: RecoveryPolicy = "resume",
    **options: object,
) -> EnginePool:
    specs = [options] * replicas
    return make_pool(
        f"fake_core:{core}", *specs, placement=LocalProcess(), start_timeout_s=30, policy=policy
    )


async def test_generate_many_requests_over_two_processes_each_gets_its_own_tokens() -> None:
    async with pool_of(replicas=2).serving() as pool:
        generations = [Generation() for _ in range(100)]
        async with anyio.create_task_group() as tasks:
            for last, generation in enumerate(generations):
                tasks.start_soon(generate, pool, [last], 20, generation)
        for last, generation in enumerate(generations):
            assert list(generation.ids) == list(range(last + 1, last + 21))
        assert {g.replica for g in generations} == {"engine-0", "engine-1"}
        assert len(children()) == 2
    assert children() == []


async def test_open_core_does_not_start_error_carries_its_words() -> None:
    with pytest.raises(EngineError, match=r"^engine-0: FileNotFoundError: no weights here$"):
        async with pool_of("BrokenCore").serving():
            pytest.fail("opened")
    assert children() == []


@pytest.mark.slow
async def test_open_worker_of_a_core_fails_error_carries_its_exception_too() -> None:
    with pytest.raises(EngineError) as raised:
        async with pool_of("BrokenWorkerCore").serving():
            pytest.fail("opened")
    assert str(raised.value) == (
        "engine-0: RuntimeError: the worker died; before that was said:\n"
        "    ValueError: no kernel for this GPU"
    )


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("torch.cuda.OutOfMemoryError: CUDA out of memory", True),
        ("[2026-11-26 14:23:56] ValueError: no kernel", True),
        ("AssertionError", True),
        ("IndexError: 0", True),
        ("RuntimeError: Rank 0 died", False),
        ("rollout.errors.EngineError: it did not start: RuntimeError: Rank 0 died", False),
        ("INFO: no Error: here", False),
    ],
)
def test_last_output_tells_exceptions_that_the_error_does_not(line: str, *, is_told: bool) -> None:
    output = LastOutput()
    output.add("Traceback (most recent call last):")
    output.add(line)
    error = "it did not start: RuntimeError: Rank 0 died\nmore"
    assert (line.rpartition("] ")[2] in output.describe_error(error).removeprefix(error)) is is_told


async def test_open_interpreter_does_not_exist_is_named() -> None:
    pool = make_pool("fake_core:CountingCore", {}, placement=LocalProcess(python="/nowhere/python"))
    with pytest.raises(EngineError, match=r"^engine-0: cannot run '/nowhere/python'"):
        async with pool.serving():
            pytest.fail("opened")


async def test_open_cancelled_while_starting_leaves_no_process() -> None:
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:

            async def open_it() -> None:
                async with pool_of("EndlessStartCore", replicas=2).serving():
                    pytest.fail("opened")

            tasks.start_soon(open_it)
            while len(children()) < 2:
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    assert children() == []


async def test_child_killed_in_mid_request_fails_it_and_is_replaced() -> None:
    async with pool_of(token_s=0.01, policy="fail").serving() as pool:
        generation = Generation()

        async def kill_soon() -> None:
            while len(generation.ids) < 3:
                await anyio.sleep(0.01)
            children()[0].kill()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_soon)
            with anyio.fail_after(10), pytest.raises(EngineError, match=r"^engine-0: the "):
                await generate(pool, [5], 1000, generation)
        assert list(generation.ids[:3]) == [6, 7, 8]
        with anyio.fail_after(20):
            assert list((await generate(pool, [1], 2)).ids) == [2, 3]


async def test_child_frozen_is_given_up_after_the_heartbeat_timeout_and_replaced() -> None:
    async with pool_of(token_s=0.01, policy="fail").serving() as pool:
        (child,) = children()
        child.suspend()
        start = anyio.current_time()
        with anyio.fail_after(10), pytest.raises(EngineError, match=r"^engine-0: silent for"):
            await generate(pool, [5], 1000)
        assert anyio.current_time() - start < 7.5
        with anyio.fail_after(20):
            assert list((await generate(pool, [1], 2)).ids) == [2, 3]
    assert not child.is_running()


DRIVER = """
import anyio, sys
sys.path[:0] = [{here!r}, {here!r} + "/.."]
from test_local_process import pool_of
async def main():
    async with pool_of(replicas=2).serving():
        print("ready", flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


def test_driver_is_interrupted_its_engines_end_within_five_seconds() -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(here=str(HERE))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "ready\n"
        engines = psutil.Process(driver.pid).children(recursive=True)
        assert len(engines) == 2
        assert all(os.getsid(engine.pid) == engine.pid for engine in engines)
        driver.send_signal(signal.SIGINT)  # killed: see `test_driver_death`
        _, alive = psutil.wait_procs(engines, timeout=5)
        assert alive == []
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
