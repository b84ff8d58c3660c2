"""What blocks the loop is noticed and named."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import anyio
import pytest

import rollout
from rollout import Prompt, function_tool
from rollout.observe.clocks import monotonic
from rollout.observe.loop_lag import LoopLag
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

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
    assert message.startswith("the event loop is blocked: tool 'rude' of trajectory p9/0 at ")
    assert f"called from {__file__}:" in message
    assert " in rude" in message


async def test_virtual_clock_has_no_watchdog_and_no_figure() -> None:
    async with rollout.open_rollout(Scenario(seed=1).reply("", "ok").config()) as runtime:
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": "x"}])])
        names = {thread.name for thread in threading.enumerate()}
    assert "rollout-watchdog" not in names
    assert "loop_lag_s/max" not in batch.metrics


def test_blocked_by_garbage_collections_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(LoopLag().watch)
            await anyio.sleep(0.05)
            begun = monotonic()
            while monotonic() - begun < 0.4:
                gc.collect()
            await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()

    with caplog.at_level(logging.WARNING, logger="rollout.observe"):
        anyio.run(main, backend="asyncio")
    (message,) = caplog.messages
    assert message.startswith("the event loop is blocked: Python collected garbage for 0.")
    assert message.endswith(" s (scheduling.freeze_heap makes that rare)")


def test_watch_cancelled_ends_its_thread() -> None:
    async def main() -> Any:
        lag = LoopLag()
        with lag.window() as window, anyio.move_on_after(0.2):
            await lag.watch()
        return window.max_s

    assert anyio.run(main) is not None
    deadline = threading.Event()
    for _ in range(100):
        if not any(t.name == "rollout-watchdog" for t in threading.enumerate()):
            break
        deadline.wait(0.02)
    assert not any(t.name == "rollout-watchdog" for t in threading.enumerate())
