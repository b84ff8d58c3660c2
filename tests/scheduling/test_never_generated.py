"""Agents that never have the model generate: they failed, and nothing is learned from them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch

import rollout
from rollout import (
    AgentLoop,
    AgentTask,
    Group,
    Outcome,
    Prompt,
    Trajectory,
    register_agent,
)
from rollout.agents import AgentContext
from rollout.batch.advantages import group_relative
from rollout.config import AgentConfig, SchedulingConfig
from rollout.integrations.skyrl.output import generator_output
from rollout.integrations.trainer_rows import trainer_rows
from rollout.scheduling import has_signal
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

SCENARIO = Scenario(seed=1).reply("", filler=12).timing(base_s=0.01, slope_s=0.0)


@register_agent("never_generates")
class NeverGenerates(AgentLoop):
    """Its first member does as its prompt says, and never generates; the others do."""

    async def run(self, context: AgentContext) -> None:
        way = context.prompt.extra.get("way", "returns")
        if context.identity.member:
            await context.generate()
            context.reward = 1.0
            return
        context.reward = 0.0
        if way == "opens":
            async with context.open_segment([{"role": "user", "content": "Go."}]) as other:
                other.reward = 0.5
        elif way in ("completed", "limit"):
            context.end(Outcome(way), "its_own")


@register_agent("only_a_sub_agent_generates")
class OnlyASubAgentGenerates(AgentLoop):
    """Its main conversation has no turn."""

    async def run(self, context: AgentContext) -> None:
        async with context.open_segment([{"role": "user", "content": "Go."}]) as other:
            await other.generate()
        context.reward = 0.5


def config(samples: int = 4, agent: str = "never_generates", **scheduling: Any) -> Any:
    return SCENARIO.config(
        agent=AgentConfig(name=agent),
        scheduling=SchedulingConfig(samples_per_prompt=samples, **scheduling),
    )


def go(uid: str = "p0", **extra: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": "Go."}], uid=uid, extra=extra)


def check_failed(trajectory: Trajectory) -> None:
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "never_generated")
    assert trajectory.cause is not None
    check_not_learned(trajectory)


def check_not_learned(trajectory: Trajectory) -> None:
    assert trajectory.trainable is False
    assert trajectory.reward is None
    assert {segment.reward for segment in trajectory.segments} == {None}


@pytest.mark.parametrize("way", ["returns", "opens"])
async def test_agent_that_returns_without_a_generation_failed_and_has_no_part_in_its_group(
    way: str,
) -> None:
    async with rollout.open_rollout(config()) as runtime:
        batch = await runtime.generate([go(way=way)])
        statistics = runtime.statistics()
    first, *others = batch.trajectories
    check_failed(first)
    assert [(t.outcome, t.reward, t.trainable) for t in others] == [("completed", 1.0, True)] * 3
    of_first = batch.tensors["groups"].new_tensor([row.member == 0 for row in batch.samples]).bool()
    assert batch.tensors["rewards"].isnan().equal(of_first)
    assert batch.tensors["trainable"].equal(~of_first)
    assert not batch.tensors["response_mask"][of_first].any()
    assert group_relative(batch).equal(torch.zeros(len(batch)))
    assert not has_signal(Group(uid="p0", prompt=go(), trajectories=batch.trajectories))
    assert batch.metrics["outcomes/failed/never_generated"] == 1
    assert (statistics.admitted, statistics.outcomes) == (4, {"failed": 1, "completed": 3})


async def test_reward_functions_are_not_asked_about_an_agent_that_never_generated() -> None:
    asked: list[int] = []

    def reward(trajectory: Trajectory) -> float:
        asked.append(trajectory.member)
        return 0.0

    def group_reward(group: Group) -> list[Any]:
        return [0.5 for _ in group.trajectories]

    async with rollout.open_rollout(config(), reward=reward) as runtime:
        batch = await runtime.generate([go()])
    check_failed(batch.trajectories[0])
    assert sorted(asked) == [1, 2, 3]
    async with rollout.open_rollout(config(), group_reward=group_reward) as runtime:
        batch = await runtime.generate([go()])
    check_failed(batch.trajectories[0])
    assert [t.reward for t in batch.trajectories] == [None, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("way", ["limit", "completed"])
async def test_outcomes_that_an_agent_names_keep_their_names_and_are_not_learned(way: str) -> None:
    every = ("completed", "length", "limit", "deadline")
    async with rollout.open_rollout(config(trainable=every), reward=lambda _: 1.0) as runtime:
        batch = await runtime.generate([go(way=way)])
    first = batch.trajectories[0]
    assert (first.outcome, first.reason) == (way, "its_own")
    check_not_learned(first)
    assert group_relative(batch).tolist() == [0.0] * 4


async def test_validation_leaves_the_outcome_of_an_agent_that_never_generated() -> None:
    async with rollout.open_rollout(config()) as runtime:
        batch = await runtime.generate([go()], samples=4, validate=True)
    first = batch.trajectories[0]
    assert (first.outcome, first.reason) == (Outcome.COMPLETED, "")
    check_not_learned(first)
    assert [t.reward for t in batch.trajectories[1:]] == [1.0] * 3


async def test_tokens_of_a_sub_agent_are_generated_tokens() -> None:
    async with rollout.open_rollout(config(1, "only_a_sub_agent_generates")) as runtime:
        (trajectory,) = (await runtime.generate([go()])).trajectories
    assert (trajectory.outcome, trajectory.trainable) == (Outcome.COMPLETED, True)
    assert trajectory.reward == 0.5


async def test_trainers_get_the_mean_of_the_group_and_mask_0_for_it() -> None:
    async with rollout.open_rollout(config()) as runtime:
        batch = await runtime.generate([go()])
    made = trainer_rows(batch, eos_token_id=2)
    assert [row.reward for row in made.rows] == [1.0] * 4
    assert [bool(row.mask.any()) for row in made.rows] == [False, True, True, True]
    output = generator_output(made.rows, None, range(4), made.metrics, zero_reward_on_non_stop=True)
    assert output["rewards"] == [1.0] * 4
    assert not any(output["loss_masks"][0])


# Over HTTP: real sockets, so real time.


@rollout.agent("asks_no_one")
async def asks_no_one(task: AgentTask) -> float:
    """The question of its first member is refused; the others ask the model."""
    body: dict[str, Any] = {"model": task.model, "messages": task.messages}
    if task.member == 0:
        body["messages"] = [{"role": "nobody", "content": 5}]
    headers = {"authorization": f"Bearer {task.api_key}"}
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        url = f"{task.base_url}/chat/completions"
        answer = await client.post(url, json=body, headers=headers)
    assert answer.status_code == (200 if task.member else 400)
    return float(task.member > 0)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_function_that_never_had_an_answer_failed() -> None:
    pytest.importorskip("h11")
    async with rollout.open_rollout(config(agent="asks_no_one")) as runtime:
        batch = await runtime.generate([go()])
    check_failed(batch.trajectories[0])
    assert [t.reward for t in batch.trajectories] == [None, 1.0, 1.0, 1.0]
    assert group_relative(batch).tolist() == [0.0] * 4
