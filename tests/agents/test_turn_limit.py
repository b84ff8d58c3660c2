"""`agent.max_assistant_turns` bounds whatever loop an agent has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio
import httpx
import pytest

import rollout
from http_agents import PROGRAMS, Client
from race_situations import add, user
from rollout import AgentContext, AgentLoop, AgentTask, Outcome, RolloutBatch, register_agent
from rollout.agents import ToolAgent
from rollout.config import AgentConfig, LimitsConfig, SchedulingConfig
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

LIMITS = LimitsConfig(generation_s=5, tool_s=5, turn_s=10, trajectory_s=60, batch_s=500)
SCENARIO = Scenario(seed=1).reply("", "Well.")
CALLING = Scenario(seed=1).reply("", tool_call("add", a=1, b=1))


async def limited(
    agent: str, most: int | None = 3, scenario: Scenario = SCENARIO, **extra: Any
) -> RolloutBatch:
    config = scenario.config(
        agent=AgentConfig(name=agent, max_assistant_turns=most),
        limits=LIMITS,
        scheduling=SchedulingConfig(samples_per_prompt=1),
    )
    async with rollout.open_rollout(config, [add]) as runtime:
        batch: RolloutBatch = await runtime.generate([user("go", extra=extra)])
    return batch


def check(batch: RolloutBatch, turns: int = 3) -> None:
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.LIMIT, "turns")
    assert trajectory.limit_source == "agent.max_assistant_turns"
    assert trajectory.cause is None
    assert trajectory.trainable
    rows = [segment.transcript for segment in trajectory.segments]
    assert sum(len(list(row.generated_spans())) for row in rows) == turns
    attended = batch.tensors["attention_mask"][:, -batch.tensors["responses"].shape[1] :]
    for mask, seen in zip(batch.tensors["response_mask"], attended, strict=True):
        length = int(seen.sum())
        assert not length or mask[length - 1] == 1  # no row ends with an observation


@register_agent("without_end")
class WithoutEnd(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        while True:
            await context.generate()
            context.observe([{"role": "user", "content": "Go on."}])


@register_agent("calling_without_end")
class CallingWithoutEnd(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        while True:
            turn = await context.generate()
            await context.call_tools(turn.calls)


@register_agent("ids_without_end")
class IdsWithoutEnd(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        await context.begin()
        ids = list(context.transcript.ids())
        while True:
            sampled = await context.generate_ids(ids)
            ids += [*sampled.ids, 65, 66]


@register_agent("swallowing")
class Swallowing(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        try:
            await WithoutEnd().run(context)
        except rollout.LimitExceeded:
            return


@register_agent("segments_without_end")
class SegmentsWithoutEnd(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        while True:
            async with context.open_segment([{"role": "user", "content": "Else?"}]) as segment:
                await segment.generate()


@register_agent("branches_at_once")
class BranchesAtOnce(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        branches = [await context.branch() for _ in range(8)]

        async def generate(branch: rollout.Conversation) -> None:
            with suppress(rollout.LimitExceeded):
                await branch.generate()

        async with anyio.create_task_group() as tasks:
            for branch in branches:
                tasks.start_soon(generate, branch)


@register_agent("delegating")
class Delegating(AgentLoop):
    """Its sub-agent is a shipped loop."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        async with context.open_segment([{"role": "user", "content": "Add."}]) as segment:
            await ToolAgent().run(segment)


@pytest.mark.parametrize(
    "agent", ["without_end", "ids_without_end", "swallowing", "segments_without_end"]
)
async def test_turn_limit_ends_a_loop_of_ones_own(agent: str) -> None:
    check(await limited(agent))


@pytest.mark.parametrize("agent", ["calling_without_end", "delegating", "tool_agent"])
async def test_turn_limit_ends_a_loop_that_calls_tools(agent: str) -> None:
    check(await limited(agent, scenario=CALLING))


async def test_turn_limit_bounds_conversations_that_generate_at_once() -> None:
    check(await limited("branches_at_once"))


async def test_turn_limit_of_none_bounds_nothing() -> None:
    (trajectory,) = (await limited("branches_at_once", None)).trajectories
    assert trajectory.outcome is Outcome.COMPLETED
    assert len(trajectory.segments) == 9


@register_agent("out_of_room")
class OutOfRoom(AgentLoop):
    """Generations that are not begun are no turns."""

    async def run(self, context: AgentContext) -> None:
        await context.begin()
        for _ in range(5):
            async with context.open_segment([{"role": "user", "content": "Else?"}]) as segment:
                segment.observe([{"role": "user", "content": "long " * 4000}])
                with pytest.raises(rollout.LimitExceeded, match="lengths"):
                    await segment.generate()
        context.extra["generations"] = context.state.generations
        for _ in range(3):
            await context.generate()
            context.observe([{"role": "user", "content": "Go on."}])


async def test_turn_limit_does_not_count_what_never_began() -> None:
    (trajectory,) = (await limited("out_of_room")).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert trajectory.extra["generations"] == 0


def chatting(client: Client) -> None:
    """Continues its conversation."""
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": "go"}]
    while True:
        reply = client.chat(*messages)
        reply.raise_for_status()
        messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "On."}]


def asking_anew(client: Client) -> None:
    """Begins each time."""
    while True:
        client.chat({"role": "user", "content": "go"}).raise_for_status()


@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
@pytest.mark.parametrize("program", [chatting, asking_anew])
async def test_turn_limit_ends_clients_of_the_gateway(program: Any) -> None:
    PROGRAMS["endless"] = program
    batch = await limited("http_agent", program="endless")
    check(batch)
    assert len(batch.trajectories[0].segments) == (1 if program is chatting else 3)


@rollout.agent("endless_function")
async def endless_function(task: AgentTask) -> None:
    headers = {"authorization": f"Bearer {task.api_key}"}
    body = {"model": task.model, "messages": [{"role": "user", "content": "go"}]}
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=30) as client:
        while True:
            reply = await client.post(f"{task.base_url}/chat/completions", json=body)
            reply.raise_for_status()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_turn_limit_ends_a_function() -> None:
    check(await limited("endless_function"))
