"""Rewards of single tokens and segments: from the reward function to tensors and disk."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import Recorder
from race_situations import add, user
from rollout import Outcome, Reward, Trajectory
from rollout.batch import RolloutBatch, collate
from rollout.chat import Transcript
from rollout.chat.trajectory import Parent, Segment
from rollout.config import AgentConfig, LengthsConfig, SchedulingConfig
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

LENGTHS = LengthsConfig(prompt=1200, response=600)
PLAIN = Scenario(seed=1).reply("go", tool_call("add", a=2, b=3)).then("Five.")
TREE = (
    Scenario(seed=1)
    .reply("another way", "Or so.", filler=5)
    .reply("researcher", "Nothing.")
    .reply("go", "An answer.")
)


async def rewarded(
    reward: Any, *, scenario: Scenario = PLAIN, agent: str = "tool_agent", samples: int = 2
) -> RolloutBatch:
    recorder = Recorder()
    config = scenario.config(
        agent=AgentConfig(name=agent),
        lengths=LENGTHS,
        scheduling=SchedulingConfig(samples_per_prompt=samples),
    )
    async with recorder.open_rollout(config, [add], reward) as runtime:
        batch: RolloutBatch = await runtime.generate([user("go")])
    assert recorder.anomalies() == []
    return batch


def counted(trajectory: Trajectory) -> list[float]:
    return [float(at) for at in range(trajectory.transcript.response_length)]


def in_bfloat16(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("kind", [list, np.array, in_bfloat16])
async def test_token_values_become_the_row_of_a_tensor(kind: Any, tmp_path: Path) -> None:
    def reward(trajectory: Trajectory) -> Reward | float:
        if trajectory.member:
            return 0.5
        return Reward(value=1.0, token_values=kind(counted(trajectory)))

    batch = await rewarded(reward)
    first, second = batch.trajectories
    values = batch.tensors["token_rewards"]
    assert (values.shape, values.dtype) == (batch.tensors["responses"].shape, torch.float32)
    length = first.transcript.response_length
    assert values[0, :length].tolist() == counted(first)
    assert values[0, length:].unique().tolist() == [0.0]
    length = second.transcript.response_length
    assert values[1, :length].isnan().all()
    assert values[1, length:].unique().tolist() == [0.0]
    assert batch.tensors["rewards"].tolist() == [1.0, 0.5]
    batch.save(tmp_path)
    loaded = RolloutBatch.load(tmp_path)
    assert loaded.tensors["token_rewards"].numpy().tobytes() == values.numpy().tobytes()
    assert loaded.trajectories[0].segments[0].token_rewards == array("f", counted(first))
    assert loaded.trajectories[1].segments[0].token_rewards is None


async def test_token_values_and_rewards_by_segment() -> None:
    def reward(trajectory: Trajectory) -> Reward:
        lengths = [segment.transcript.response_length for segment in trajectory.segments]
        return Reward(
            value=1.0,
            token_values={2: [0.5] * lengths[2]},
            segment_values={1: -1.0, 3: 2.0},
        )

    batch = await rewarded(reward, scenario=TREE, agent="tree", samples=1)
    (trajectory,) = batch.trajectories
    # The agent's own reward of its first branch gives way.
    assert batch.tensors["rewards"].tolist() == [1.0, -1.0, 1.0, 2.0]
    values = batch.tensors["token_rewards"]
    length = trajectory.segments[2].transcript.response_length
    assert values[2, :length].tolist() == [0.5] * length
    assert values[0, : trajectory.transcript.response_length].isnan().all()


async def test_turn_values_stand_on_the_last_token_of_each_turn() -> None:
    def reward(trajectory: Trajectory) -> Reward:
        return Reward(value=1.0, turn_values=np.array([0.25, -2.0]))  # type: ignore[arg-type]

    (trajectory,) = (await rewarded(reward, samples=1)).trajectories
    transcript = trajectory.transcript
    first, second = transcript.generated_spans()
    expected = [0.0] * transcript.response_length
    expected[first.stop - 1 - transcript.prompt_length] = 0.25
    expected[second.stop - 1 - transcript.prompt_length] = -2.0
    values = trajectory.segments[0].token_rewards
    assert values is not None
    assert list(values) == expected


async def test_turn_values_and_token_values_of_one_segment_fail_their_trajectory() -> None:
    def reward(trajectory: Trajectory) -> Reward:
        return Reward(value=1.0, token_values=counted(trajectory), turn_values={0: [1.0, 1.0]})

    (trajectory,) = (await rewarded(reward, samples=1)).trajectories
    assert trajectory.cause is not None
    assert "token_values and turn_values of the segment 0" in trajectory.cause.message


BAD = [
    (Reward(value=1.0, turn_values=[1.0]), "turn_values of shape (1,); expected one for each of"),
    (Reward(value=1.0, turn_values=[0.0, float("inf")]), "inf for turn 1; expected a finite numbe"),
    (Reward(value=1.0, token_values=[[1.0]]), "token_values of shape (1, 1); expected one for"),
    (Reward(value=1.0, token_values="abc"), "token_values that are no numbers"),
    (Reward(value=1.0, token_values={1: []}), "the segment 1; the trajectory has 1"),
    (Reward(value=1.0, segment_values={0: float("nan")}), "returned nan; expected a finite number"),
    (Reward(value=1.0, segment_values=[1.0]), "the segment_values [1.0]; expected a mapping"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("reward", "said"), BAD)
async def test_token_values_that_do_not_fit_fail_their_trajectory(
    reward: Reward, said: str
) -> None:
    (trajectory,) = (await rewarded(lambda _: reward, samples=1)).trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "reward")
    assert trajectory.cause is not None
    assert said in trajectory.cause.message


def spoken(*ids: int) -> Transcript:
    transcript = Transcript()
    transcript.append_prompt([1, 2])
    transcript.append_generated(
        list(ids), [-0.5] * len(ids), versions=[(0, len(ids))], finish_reason="stop"
    )
    transcript.append_observation([9])
    return transcript


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_collate_token_rewards_leave_out_what_the_row_leaves_out(layout: Any) -> None:
    lengths = LengthsConfig(prompt=2, response=4)
    one = Segment(transcript=spoken(5, 6), token_rewards=array("f", [1.0, 2.0, 3.0]))
    two = Segment(transcript=spoken(7), parent=Parent(0, 2), purpose="branch")
    row = Trajectory(uid="p", group=0, member=0, outcome=Outcome.COMPLETED, segments=[one, two])
    values = collate([row], lengths, 0, layout).tensors["token_rewards"]
    rows = [piece.tolist() for piece in values.unbind()]
    assert rows[0] == [1.0, 2.0] + [0.0] * (2 if layout == "padded" else 0)
    assert np.isnan(rows[1][0])
    assert rows[1][1:] == [0.0] * (3 if layout == "padded" else 0)
    one.token_rewards = array("f", [1.0])
    with pytest.raises(ValueError, match=r"segments\[0\] has 1 token_rewards; expected 3"):
        collate([row], lengths, 0, layout)


@pytest.mark.parametrize("parent", [(0, 1), (2, 1), (0, 99)])
def test_trajectory_parent_that_is_none_is_refused(parent: tuple[int, int]) -> None:
    main = Segment(transcript=spoken(5, 6))
    other = Segment(transcript=spoken(5), parent=Parent(*parent), purpose="branch")
    segments = [main, other]
    if parent == (0, 1):
        segments = [other]
    with pytest.raises(ValueError, match=r"segments\[\d\]\.parent = "):
        Trajectory(uid="p", group=0, member=0, outcome=Outcome.COMPLETED, segments=segments)
