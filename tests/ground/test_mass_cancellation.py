"""Ten thousand trajectories that are cancelled at once: what that costs the event loop."""

from __future__ import annotations

import os
from typing import Any

import anyio
import pytest

import rollout
from rollout import AgentLoop, Outcome, Prompt
from rollout.agents import AgentContext
from rollout.clocks import thread_cpu
from rollout.config import SchedulingConfig
from rollout.testing import Scenario

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.usefixtures("collector_of_users"),
]

COUNT = 10_000
#: CPU seconds of the loop's thread, on a machine with nothing else to do.
AT_MOST_S = 2.0
PROMPTS = [Prompt("go", uid=f"{at}", agent_name="waits_for_ever") for at in range(COUNT // 10)]


@rollout.register_agent("waits_for_ever")
class WaitsForEver(AgentLoop):
    """Waits in code of its own."""

    async def run(self, context: AgentContext) -> None:
        await anyio.sleep_forever()


@pytest.mark.parametrize("how", ["runtime.cancel", "the caller's cancellation"])
@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
async def test_trajectories_cancelled_at_once_take_two_seconds_of_loop(
    anyio_backend: str, how: str
) -> None:
    config = Scenario(seed=1).config(
        scheduling=SchedulingConfig(max_in_flight=COUNT, samples_per_prompt=10)
    )
    ended: list[Any] = []

    async def generate() -> None:
        batch = await runtime.generate(PROMPTS)
        ended.extend(trajectory.outcome for trajectory in batch.trajectories)

    async with rollout.open_rollout(config) as runtime:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            while runtime.statistics().running < COUNT:
                await anyio.sleep(0.1)
            await anyio.sleep(0.5)  # the last of them have begun to wait
            began = thread_cpu()
            if how == "runtime.cancel":
                assert runtime.cancel(reason="enough") == COUNT
            else:
                tasks.cancel_scope.cancel()
        took_s = thread_cpu() - began
        statistics = runtime.statistics()
    print(f"{anyio_backend}, {how}: {took_s:.2f} s of loop")
    assert (statistics.running, statistics.finished) == (0, COUNT)
    assert set(ended) <= {Outcome.CANCELLED}
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)  # all else is held to its promise there
    assert is_busy or took_s <= AT_MOST_S
