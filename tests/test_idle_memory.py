"""What a trajectory holds while it waits."""

from __future__ import annotations

import gc
import tracemalloc

import anyio
import pytest

import rollout
from rollout import Prompt
from rollout.testing import Scenario, run_virtual

FEW, MANY = 50, 200
#: The driver's: without what the engine, which lives in this process, reads and holds.
DRIVER = [
    tracemalloc.Filter(inclusive=True, filename_pattern=f"*/rollout/{part}/*.py")
    for part in (
        "agents",
        "chat",
        "engine/pool",
        "engine/channel",
        "engine/routing",
        "scheduling",
        "tools",
    )
] + [
    tracemalloc.Filter(inclusive=False, filename_pattern=f"*/engine/channel/{module}.py")
    for module in ("framing", "server_session")
]
#: The driver's Python objects alone, 8,440 as it is; with stacks of tasks it may hold 20 KB in all.
MOST_BYTES = 8_600


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(messages=[{"role": "user", "content": "wait"}], uid=f"uid-{number}")
        for number in range(count)
    ]


async def bytes_while_waiting(count: int) -> int:
    """What so many trajectories hold while all of them await their engine."""
    config = Scenario(seed=1).reply("", filler=100_000).config()
    async with rollout.open_rollout(config) as runtime:
        asked = prompts(count)
        gc.collect()
        async with runtime.stream(asked):
            while runtime.statistics().replicas[0].in_flight < count:
                await anyio.sleep(0.01)
            gc.collect()
            if not tracemalloc.is_tracing():
                return 0
            traces = tracemalloc.take_snapshot().filter_traces(DRIVER).traces
            return sum(trace.size for trace in traces)


async def measure() -> float:
    """Bytes of one more that waits."""
    await bytes_while_waiting(FEW)  # what is made once
    tracemalloc.start()
    try:
        few, many = await bytes_while_waiting(FEW), await bytes_while_waiting(MANY)
    finally:
        tracemalloc.stop()
    return (many - few) / (MANY - FEW)


@pytest.mark.slow
def test_trajectories_await_their_engine_each_holds_few_bytes() -> None:
    assert run_virtual(measure) < MOST_BYTES
