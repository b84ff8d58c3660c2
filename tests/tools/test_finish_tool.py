"""Tools that end a trajectory with its answer."""

from __future__ import annotations

import pytest

import rollout
from rollout.testing import Scenario, tool_call
from rollout.tools import finish, submit

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("tool", [finish, submit])
async def test_answer_ends_the_trajectory_and_reaches_the_reward(tool: rollout.Tool) -> None:
    seen = []

    def reward(trajectory: rollout.Trajectory) -> float:
        seen.append(dict(trajectory.extra))
        return 1.0

    scenario = Scenario().reply("2 + 3", tool_call(tool.name, answer="5")).then("not reached")
    prompt = rollout.Prompt(messages=[{"role": "user", "content": "2 + 3"}], extra={"level": 1})
    async with rollout.open_rollout(scenario.config(), tools=[tool], reward=reward) as runtime:
        batch = await runtime.generate([prompt])
    assert seen == [{"level": 1, "answer": "5"}]
    (sample,) = batch.samples
    assert sample.outcome == "completed"
    assert sample.extra["answer"] == "5"
    assert [message.role for message in batch.trajectories[0].messages] == [
        "user",
        "assistant",
        "tool",
    ]
    assert prompt.extra == {"level": 1}
