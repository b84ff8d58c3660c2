"""`rollout.batch.advantages`: exact values, and what does not count."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from harness import Recorder
from race_situations import add, user
from rollout import Trajectory
from rollout.batch import RolloutBatch
from rollout.batch.advantages import group_relative, leave_one_out, mean_at_k, pass_at_k
from rollout.config import AgentConfig, LengthsConfig, SchedulingConfig
from rollout.testing import Scenario

NAN = math.nan


def test_group_relative_divides_by_the_deviation_of_its_own_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 7.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    values = group_relative(rewards, groups)
    spread = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    other = 1.0 / (math.sqrt(2) + 1e-6)
    expected = [spread, -spread, -spread, spread, -other, other]
    assert values.dtype == torch.float32
    assert values.tolist() == pytest.approx(expected, abs=1e-6)


def test_group_relative_without_the_deviation_is_centred() -> None:
    values = group_relative(
        torch.tensor([1.0, 0.0, 0.5, 3.0]), torch.tensor([4, 4, 4, 9]), divide_by_std=False
    )
    assert values.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_leave_one_out_compares_with_the_others() -> None:
    values = leave_one_out(torch.tensor([1.0, 0.0, 0.5, 3.0]), torch.tensor([4, 4, 4, 9]))
    assert values.tolist() == pytest.approx([0.75, -0.75, 0.0, 0.0])


@pytest.mark.parametrize("function", [group_relative, leave_one_out])
def test_advantages_leave_out_what_is_not_trainable_or_not_known(function: Any) -> None:
    rewards = torch.tensor([1.0, 9.0, 0.0, NAN, 2.0, 2.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    trainable = torch.tensor([True, False, True, True, True, True])
    values = function(rewards, groups, trainable)
    alone = function(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    assert values[[0, 2]].tolist() == alone.tolist()
    assert values[[1, 3, 4, 5]].tolist() == [0.0] * 4


@pytest.mark.parametrize("function", [group_relative, leave_one_out])
def test_advantages_count_a_trajectory_of_several_segments_once(function: Any) -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.5, 1.0])
    groups = torch.tensor([0, 0, 0, 0, 0, 1])
    trajectories = torch.tensor([0, 0, 0, 1, 2, 0])  # counted afresh in the other group
    trainable = torch.tensor([True, True, False, True, True, True])
    values = function(rewards, groups, trainable, trajectories=trajectories)
    first, second, third = function(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 0])).tolist()
    assert values.tolist() == [first, first, 0.0, second, third, 0.0]


TREE = Scenario(seed=1).reply("another way", "Or so.").reply("researcher", "No.").reply("go", "An.")


@pytest.mark.anyio
async def test_advantages_of_a_batch_stand_on_every_segment_of_a_trajectory() -> None:
    def reward(trajectory: Trajectory) -> float:
        if trajectory.member == 2:
            raise OSError("no judge")
        return float(trajectory.member)

    config = TREE.config(
        agent=AgentConfig(name="tree"),
        lengths=LengthsConfig(prompt=1200, response=600),
        scheduling=SchedulingConfig(samples_per_prompt=3),
    )
    async with Recorder().open_rollout(config, [add], reward) as runtime:
        batch: RolloutBatch = await runtime.generate([user("go")])
    rows = len(batch) // 3
    assert rows > 1
    for values in (
        group_relative(batch, divide_by_std=False),
        group_relative(
            RolloutBatch(tensors=batch.tensors, samples=batch.samples, metrics={}),
            divide_by_std=False,
        ),
    ):
        assert values.shape == (len(batch),)
        learned = batch.tensors["trainable"]
        assert values[learned & (torch.arange(len(batch)) < rows)].unique().tolist() == [-0.5]
        of_second = learned & (torch.arange(len(batch)) >= rows)
        assert values[of_second].unique().tolist() == [0.5]
        assert values[2 * rows :].tolist() == [0.0] * rows
    assert mean_at_k(batch, k=2) == 0.5


def test_pass_at_k_is_the_share_of_all_choices_with_one_that_passed() -> None:
    outcomes = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]]
    rewards = torch.tensor(outcomes, dtype=torch.float32).flatten()
    groups = torch.arange(4).repeat_interleave(5)
    for k in range(1, 6):
        chosen = [[max(pick) for pick in itertools.combinations(each, k)] for each in outcomes]
        expected = sum(sum(each) / len(each) for each in chosen) / 4
        assert pass_at_k(rewards, groups, k=k) == pytest.approx(expected)
    assert mean_at_k(rewards, groups, k=2) == pytest.approx(0.4)


def test_pass_at_k_of_groups_of_unequal_size_leaves_out_those_too_small() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.6, NAN, 1.0])
    groups = torch.tensor([0, 0, 1, 1, 2])
    assert pass_at_k(rewards, groups, k=2) == 1.0
    assert pass_at_k(rewards, groups, k=1) == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert pass_at_k(rewards, groups, k=1, threshold=0.5) == pytest.approx((0.5 + 1.0 + 1.0) / 3)
    with pytest.raises(ValueError, match=r"k = 3: no group has so many .*the largest has 2"):
        mean_at_k(rewards, groups, k=3)
    with pytest.raises(ValueError, match="k = 0: expected an integer ≥ 1"):
        pass_at_k(rewards, groups, k=0)


def test_advantages_of_tensors_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="groups = None"):
        group_relative(torch.zeros(3))
    with pytest.raises(ValueError, match=r"rewards \(3,\), groups \(2,\)"):
        leave_one_out(torch.zeros(3), torch.zeros(2))


@pytest.mark.anyio
async def test_pass_at_k_of_a_batch_without_its_trajectories_is_that_of_one_with_them() -> None:
    config = TREE.config(scheduling=SchedulingConfig(samples_per_prompt=2))
    async with Recorder().open_rollout(config, reward=lambda trajectory: 0.7) as runtime:
        batch: RolloutBatch = await runtime.generate([user("go")])
    bare = RolloutBatch(tensors=batch.tensors, samples=batch.samples, metrics={})
    for each in (batch, bare):
        assert pass_at_k(each, k=1, threshold=0.7) == 1.0
        assert pass_at_k(each, k=1, threshold=0.701) == 0.0


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e9 + 0.1])
def test_advantages_of_equal_rewards_are_exactly_zero(reward: float) -> None:
    rewards, groups = torch.full((3,), reward, dtype=torch.float64), torch.zeros(3)
    assert group_relative(rewards, groups).tolist() == [0.0] * 3
    assert group_relative(rewards, groups, divide_by_std=False).tolist() == [0.0] * 3
    assert leave_one_out(rewards, groups).tolist() == [0.0] * 3


def test_advantages_of_infinite_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\] = -inf: expected finite numbers, and NaN"):
        group_relative(torch.tensor([1.0, -math.inf]), torch.zeros(2))
