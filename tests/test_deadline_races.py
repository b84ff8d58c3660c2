"""A deadline that is put off in the round in which it fires; a wait that doubles for ever."""

from __future__ import annotations

import anyio
import pytest

import rollout
from rollout import Outcome, Prompt
from rollout.config import LimitsConfig
from rollout.errors import LimitExceeded
from rollout.limits import Deadline, PausableDeadline
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio


async def test_deadline_paused_as_it_fires_ends_its_block_all_the_same() -> None:
    outermost = Deadline.after(60.0, "limits.batch_s")
    own = Deadline.after(1.0, "limits.generation_s")
    found: list[str] = []

    async def wait(deadline: PausableDeadline) -> None:
        try:
            with deadline:
                await anyio.sleep_forever()
            found.append("left without an error")
        except LimitExceeded as error:
            found.append(error.source)

    async def pause(deadline: PausableDeadline) -> None:
        await anyio.sleep_until(own.at)
        deadline.pause()

    async with anyio.create_task_group() as tasks:
        for _ in range(16):  # which of the two is first differs
            deadline = PausableDeadline(own, outermost)
            tasks.start_soon(wait, deadline)
            tasks.start_soon(pause, deadline)
    assert found == ["limits.generation_s"] * 16


async def test_deadline_paused_before_it_fires_is_put_off() -> None:
    outermost = Deadline.after(60.0, "limits.batch_s")
    deadline = PausableDeadline(Deadline.after(1.0, "limits.generation_s"), outermost)
    began = anyio.current_time()
    with pytest.raises(LimitExceeded, match="generation_s"):
        with deadline:
            await anyio.sleep(0.5)
            deadline.pause()
            await anyio.sleep(10)
            deadline.resume()
            await anyio.sleep_forever()
    assert anyio.current_time() - began == pytest.approx(11.0)


@pytest.mark.slow
async def test_engine_that_is_full_for_hours_ends_a_trajectory_by_its_limit() -> None:
    full = Scenario(seed=1).reply("", filler=5).fault(reject_share=1.0)
    limits = LimitsConfig(batch_s=9000.0, trajectory_s=8000.0, turn_s=None, generation_s=7000.0)
    async with rollout.open_rollout(full.config(limits=limits)) as runtime:
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": "x"}])])
    [trajectory] = batch.trajectories
    assert (trajectory.outcome, trajectory.limit_source) == (
        Outcome.DEADLINE,
        "limits.generation_s",
    )
