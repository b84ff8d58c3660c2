"""What blocks the loop is noticed and named, and nothing else is."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

import rollout
from forked import python_program
from rollout import Prompt, function_tool
from rollout.clocks import monotonic, thread_cpu
from rollout.observe.loop_lag import BLOCKED_S, LoopLag
from rollout.testing import Scenario, tool_call
from slow_cases import slow_after

pytestmark = [pytest.mark.anyio, pytest.mark.process]

BACKENDS = ("asyncio", "trio")
HOLD = threading.Event()  # never set: waiting on it blocks the loop for the time given


@function_tool
async def rude() -> str:
    """Block the loop."""
    HOLD.wait(0.4)
    return "sorry"


def test_blocked_loop_names_tool_trajectory_file_and_line(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> rollout.RolloutBatch:
        config = Scenario(seed=1).reply("go", tool_call("rude")).then("ok").config()
        async with rollout.open_rollout(config, [rude]) as runtime:
            prompt = Prompt(messages=[{"role": "user", "content": "go"}], uid="p9")
            batch = await runtime.generate([prompt])
            assert runtime.statistics().loop_lag_s > 0.25
            return batch

    with caplog.at_level(logging.WARNING, logger="rollout.observe"):
        batch = anyio.run(main, backend="asyncio")
    assert batch.metrics["loop_lag_s/max"] > 0.25
    (record,) = [r for r in caplog.records if "tool 'rude'" in r.getMessage()]
    message = record.getMessage()
    assert message.startswith("the event loop is blocked: ")
    assert "tool 'rude' of trajectory p9/0 at " in message
    assert f"called from {__file__}:" in message
    assert " in rude" in message


async def test_virtual_clock_has_no_watchdog_and_no_figure() -> None:
    async with rollout.open_rollout(Scenario(seed=1).reply("", "ok").config()) as runtime:
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": "x"}])])
        names = {thread.name for thread in threading.enumerate()}
    assert "rollout-watchdog" not in names
    assert "loop_lag_s/max" not in batch.metrics


@pytest.mark.usefixtures("collector_of_users")  # a full collection takes long
def test_blocked_by_garbage_collections_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> float:
        """How much of a core the loop got."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(LoopLag().watch)
            await anyio.sleep(0.05)
            begun, cpu = monotonic(), thread_cpu()
            while not caplog.messages and monotonic() - begun < 20:
                gc.collect()
            share = (thread_cpu() - cpu) / (monotonic() - begun)
            await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
        return share

    with caplog.at_level(logging.WARNING, logger="rollout.observe"):
        share = anyio.run(main, backend="asyncio")
    if not caplog.messages and share < 0.9:
        pytest.skip("a loop that other programs starve is not told of as blocked")
    message, *_ = caplog.messages  # a long one is named again
    assert message.startswith("the event loop is blocked: Python collected garbage for ")
    assert message.endswith(" s (scheduling.freeze_heap makes that rare)")


def test_watch_cancelled_ends_its_thread() -> None:
    async def main() -> Any:
        lag = LoopLag()
        with lag.window() as window, anyio.move_on_after(0.2):
            await lag.watch()
        return window.blocked_s

    assert anyio.run(main) is not None
    deadline = threading.Event()
    for _ in range(100):
        if not any(t.name == "rollout-watchdog" for t in threading.enumerate()):
            break
        deadline.wait(0.02)
    assert not any(t.name == "rollout-watchdog" for t in threading.enumerate())


def forward() -> None:
    """A trainer's own work, on the loop."""
    HOLD.wait(0.3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_caller_blocks_its_own_loop_is_named_as_such_and_once(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> rollout.RuntimeStatistics:
        async with rollout.open_rollout(Scenario(seed=1).reply("", "ok").config()) as runtime:
            for _ in range(3):
                await anyio.sleep(0.1)
                forward()
            await anyio.sleep(0.1)
            return runtime.statistics()

    with caplog.at_level(logging.WARNING, logger="rollout.observe"):
        statistics = anyio.run(main, backend=backend)
    (message,) = caplog.messages
    assert message.startswith("the event loop is blocked: the caller's own code at ")
    assert f"called from {__file__}:" in message
    assert message.endswith(" in forward")
    assert statistics.loop_lag_s > BLOCKED_S


@pytest.mark.slow
def test_blocked_inside_installed_code_names_the_task(caplog: pytest.LogCaptureFixture) -> None:
    """A trainer may be a package: of its frames the task's outermost is named."""
    package = {"__name__": "trainer.loop", "HOLD": HOLD}
    source = "async def fit():\n    step()\ndef step():\n    HOLD.wait(0.3)\n"
    exec(compile(source, "/venv/site-packages/trainer/loop.py", "exec"), package)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(LoopLag().watch)
            tasks.start_soon(package["fit"])
            await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()

    with caplog.at_level(logging.WARNING, logger="rollout.observe"):
        anyio.run(main, backend="asyncio")
    (message,) = caplog.messages
    assert message.startswith("the event loop is blocked: the caller's own code at ")
    assert message.endswith("called from /venv/site-packages/trainer/loop.py:2 in fit")


def test_thread_that_holds_the_interpreter_is_told_from_the_tasks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def said() -> bool:
        start = "the event loop is blocked: other threads computed"
        return any(each.startswith(start) for each in caplog.messages)

    async def main() -> float | None:
        lag = LoopLag()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lag.watch)
            while not said():  # on a full machine it may hold the lock without a CPU
                await anyio.to_thread.run_sync(sum, range(15_000_000))
            tasks.cancel_scope.cancel()
        return lag.total.blocked_s

    with caplog.at_level(logging.WARNING, logger="rollout.observe"):
        blocked_s = anyio.run(main, backend="asyncio")
    assert blocked_s is not None
    assert blocked_s > BLOCKED_S


IDLE = """
import json, logging, sys
import anyio
import rollout
from rollout.testing import Scenario

class Lines(logging.Handler):
    def emit(self, record):
        (blocked if "is blocked" in record.getMessage() else others).append(record.getMessage())

blocked, others = [], []
logger = logging.getLogger("rollout.observe")
logger.addHandler(Lines())
logger.setLevel(logging.INFO)

async def main():
    async with rollout.open_rollout(Scenario(seed=1).reply("", "ok").config()) as runtime:
        await anyio.sleep(0.3)
        blocked.clear()  # opening imports things, on the loop
        runtime._lag.total.__init__()
        print("idle", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        await anyio.sleep(0.3)
        statistics = runtime.statistics()
        lags = statistics.loop_lag_s, statistics.loop_starved_s
        print(json.dumps([blocked, others, *lags]), flush=True)

anyio.run(main, backend=sys.argv[1])
"""


@contextmanager
def idle_process(backend: str, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A process with an open runtime and nothing to do, until it is sent a line."""
    command = [*prefix, sys.executable, "-c", IDLE, backend]
    streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen(command, text=True, **streams)
        if prefix
        else python_program(IDLE, backend, **streams)
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "idle\n"
            yield process
        finally:
            process.kill()


def said_by(process: subprocess.Popen[str]) -> tuple[list[str], list[str], float, float]:
    """Lines on what blocked it, other lines, its lag and how long it was starved."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    blocked, others, lag_s, starved_s = json.loads(process.stdout.readline())
    return blocked, others, lag_s, starved_s


@pytest.mark.parametrize("backend", slow_after(1, BACKENDS))
def test_idle_loop_of_a_stopped_process_is_not_blocked(backend: str) -> None:
    with idle_process(backend) as process:
        for _ in range(3):
            os.kill(process.pid, signal.SIGSTOP)
            HOLD.wait(0.5)
            os.kill(process.pid, signal.SIGCONT)
            HOLD.wait(0.1)
        blocked, others, lag_s, starved_s = said_by(process)
    assert blocked == []
    assert lag_s <= BLOCKED_S < starved_s
    (line,) = others
    assert line.startswith("the machine did not run the event loop's thread for ")


SPINNERS = 12


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_idle_loop_of_a_starved_machine_is_not_blocked(backend: str) -> None:
    """One CPU, a dozen programs that compute, and the runtime with the lowest priority of all."""
    cpu = str(min(os.sched_getaffinity(0)))
    pin = ("taskset", "--cpu-list", cpu)
    with idle_process(backend, *pin, "nice", "-n", "19") as process:
        spin = [*pin, sys.executable, "-c", "while True: pass"]
        spinners = [subprocess.Popen(spin) for _ in range(SPINNERS)]
        try:
            HOLD.wait(20.0)
            process.stdin.write("\n")  # type: ignore[union-attr]
        finally:
            for spinner in spinners:
                spinner.kill()
                spinner.wait()
        blocked, others, lag_s, starved_s = said_by(process)
    assert blocked == []
    assert lag_s <= BLOCKED_S < starved_s
    assert len(others) == 1
