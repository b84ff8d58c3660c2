"""What the metrics of a call say of the lengths that it preferred, against what there was."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from test_groups import config, prompts

import rollout
from rollout import Group, GroupPolicy, Outcome, Trajectory
from rollout.scheduling.selection import Selection
from rollout.testing import Scenario, run_virtual

pytestmark = pytest.mark.anyio

FILLER = {"median": 40, "sigma": 1.0, "max": 800}
LONG_TAIL = Scenario(seed=5).reply("", filler=FILLER)
COUNT = 16


def mean(batch: Any) -> float:
    lengths = [t.generated_length for t in batch.trajectories]
    return sum(lengths) / len(lengths)


@functools.cache
def length_of_all() -> float:
    """The mean length of all trajectories, which no call cuts off."""

    async def act() -> float:
        async with rollout.open_rollout(config(LONG_TAIL, samples=4)) as runtime:
            return mean(await runtime.generate(prompts(COUNT), step=0))

    return run_virtual(act)


@pytest.fixture(name="whole")
def _whole() -> float:
    return length_of_all()


async def collected(groups: int, count: int = COUNT, **policy: Any) -> Any:
    async with rollout.open_rollout(config(LONG_TAIL, samples=4)) as runtime:
        return await runtime.collect(prompts(count), groups, policy=GroupPolicy(**policy), step=0)


async def test_selection_counts_what_a_call_leaves_as_cut_off(whole: float) -> None:
    batch = await collected(COUNT // 2, oversample=2.0, surplus="carry")
    found = batch.metrics
    assert found["selection/length/accepted"] == pytest.approx(mean(batch))
    assert found["selection/length/finished"] < found["selection/length/started"] < whole
    assert found["selection/length_bias"] == pytest.approx(mean(batch) / whole, abs=0.15)
    assert found["groups/carried"] == COUNT // 2


async def test_groups_that_finished_and_were_not_taken_are_counted() -> None:
    policy = GroupPolicy(oversample=3.0)
    async with rollout.open_rollout(config()) as runtime:
        found = (await runtime.collect(prompts(3), 1, policy=policy)).metrics
    assert found["groups/accepted"] == 1
    assert (found["groups/carried"], found["groups/cancelled"]) == (2, 0)


async def test_selection_of_an_open_stream_counts_what_runs_as_cut_off(whole: float) -> None:
    taken: list[Group] = []
    tail = Scenario(seed=5, stream_interval=1).reply("", filler=FILLER)  # each token is known
    async with rollout.open_rollout(config(tail, samples=4)) as runtime:
        async with runtime.stream_groups(
            prompts(COUNT),
            step=0,
            max_staleness=0,
            groups_per_step=COUNT,
        ) as groups:
            while len(taken) < COUNT // 3:
                taken.append(await anext(groups))
            found = groups.metrics()
        left = groups.metrics()
    lengths = [t.generated_length for group in taken for t in group.trajectories]
    bias = sum(lengths) / len(lengths) / whole
    assert found["selection/length_bias"] == pytest.approx(bias, abs=0.15)
    for name in ("length/started", "length_bias"):
        assert found[f"selection/{name}"] == pytest.approx(left[f"selection/{name}"], rel=0.05)


@pytest.mark.parametrize(
    ("outcome", "reason", "source", "is_cut"),
    [
        (Outcome.COMPLETED, "stop", None, False),
        (Outcome.LENGTH, "response", None, False),
        (Outcome.CANCELLED, "surplus", None, True),
        (Outcome.DEADLINE, "group", "scheduling.groups.group_s", True),
        (Outcome.DEADLINE, "batch", "limits.batch_s", True),
        (Outcome.DEADLINE, "carry", "limits.carry_s", True),
        (Outcome.DEADLINE, "trajectory", "limits.trajectory_s", False),
        (Outcome.DEADLINE, "reward", "limits.batch_s", False),
    ],
)
def test_selection_cut_off_is_what_a_call_ended(
    outcome: Outcome, reason: str, source: str | None, is_cut: bool
) -> None:
    selection = Selection()
    trajectory = Trajectory(
        uid="p", group=0, member=0, outcome=outcome, reason=reason, limit_source=source
    )
    selection.note_end(trajectory)
    assert ("selection/length/finished" in selection.metrics()) is not is_cut
    assert "selection/length/started" in selection.metrics()


def test_selection_bias_counts_those_that_were_cut_off_as_longer() -> None:
    selection = Selection()
    taken = Trajectory(uid="p", group=0, member=0, outcome=Outcome.COMPLETED)
    assert "selection/length_bias" not in selection.metrics()
    selection.note_cut_off(20)
    selection.note_accepted([taken])
    assert "selection/length_bias" not in selection.metrics()  # all were cut off
    selection.note_end(taken)
    assert selection.metrics([10])["selection/length_bias"] == 0.0


async def test_selection_rewards_of_groups_are_of_one_scale() -> None:
    async def of_each(trajectory: Trajectory) -> float:
        return 100.0

    async def of_group(group: Group) -> list[float]:
        return [int(group.uid[1:]) + each.member for each in group.trajectories]

    opened = config(samples=2)
    async with rollout.open_rollout(opened, reward=of_each, group_reward=of_group) as runtime:
        odd = GroupPolicy(accept=lambda group: group.uid in ("p1", "p3"))
        found = (await runtime.collect(prompts(4), 2, policy=odd)).metrics
    assert found["selection/reward/accepted"] == 2.5
    assert found["selection/reward/finished"] == 2.0


async def test_selection_rewards_of_a_group_count_in_the_call_that_gave_them() -> None:
    async def of_group(group: Group) -> list[float]:
        return [float(group.uid[1:])] * len(group.trajectories)

    async with rollout.open_rollout(config(samples=2), group_reward=of_group) as runtime:
        source = prompts(4)
        first = await runtime.collect(source, 1, policy=GroupPolicy(oversample=3.0))
        found = (await runtime.collect(source, 3)).metrics
    assert first.metrics["selection/reward/finished"] == 1.0  # of p0 to p2
    assert found["groups/accepted"] == 3
    assert found["selection/reward/finished"] == 3.0
