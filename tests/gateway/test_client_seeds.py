"""Seeds that clients of the gateway send: each member of a group has samples of its own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway_clients import ask, echo, tried, user
from harness import Recorder
from rollout import AgentContext, AgentLoop, Prompt, register_agent
from rollout.config import AgentConfig, SchedulingConfig
from rollout.gateway.session import GatewaySession
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

HELLO = Scenario(seed=1).reply("question", filler=30)


async def talk(session: GatewaySession, context: AgentContext) -> None:
    """Two turns, and one with several samples, all with one seed."""
    first = (await ask(session, user("question"), seed=7)).answers[0]
    await ask(session, user("question"), echo(first), user("more"), seed=7)
    await ask(session, user("question"), echo(first), user("most"), seed=7, n=2)


async def rows(members: int, trial: Any = talk) -> list[list[bytes]]:
    """Of each member what its rows say."""
    batch = (await tried(trial, HELLO, samples=members)).batch
    return [[each.transcript.ids_bytes() for each in t.segments] for t in batch.trajectories]


async def test_client_seed_gives_each_member_samples_of_its_own() -> None:
    members = await rows(4)
    for sampled in zip(*members, strict=True):
        assert len(set(sampled)) == 4
    assert await rows(4) == members


async def test_client_seed_samples_the_same_again_within_its_member() -> None:
    answers: list[str] = []

    async def trial(session: GatewaySession, context: AgentContext) -> None:
        seeds = (7, 7, 8, None, None, 2**63 - 1, 0)
        asks = [await ask(session, user("question"), seed=seed) for seed in seeds]
        answers.extend(each.answers[0].text for each in asks)

    await rows(1, trial)
    assert answers[0] == answers[1]
    assert len(set(answers)) == 6


async def test_agent_that_sets_a_seed_gives_each_member_samples_of_its_own() -> None:
    """A native agent's `sampling` has one for each turn, whatever the agent puts there."""

    @register_agent("sets_a_seed")
    class SetsASeed(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            context.sampling = msgspec.structs.replace(context.sampling, seed=7)
            await context.generate()
            async with context.open_segment(
                [{"role": "user", "content": "question"}], sampling=context.sampling
            ) as segment:
                await segment.generate()

    config = HELLO.config(
        agent=AgentConfig(name="sets_a_seed"), scheduling=SchedulingConfig(samples_per_prompt=4)
    )
    async with Recorder().open_rollout(config) as runtime:
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": "question"}])])
    sampled = [s.transcript.ids_bytes() for t in batch.trajectories for s in t.segments]
    assert len(set(sampled)) == 8
