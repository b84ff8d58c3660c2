"""What a runtime opens on demand, or for readers that come later."""

from __future__ import annotations

import sys
from typing import Any

import anyio
import pytest

import rollout
from rollout import AgentTask, Outcome, Prompt
from rollout.observe.events import RuntimeSampled
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio
SCENARIO = Scenario(seed=1).reply("", "Well.").timing(base_s=1.0)


@rollout.agent("wants_a_gateway", backend="native")
async def wants_a_gateway(task: AgentTask) -> float:
    """Is never called: its gateway cannot be opened."""
    return 1.0


def user(text: str, **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


async def test_gateway_that_cannot_be_imported_fails_those_who_want_it_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rollout.open_rollout(SCENARIO.config()) as runtime:
        monkeypatch.setitem(sys.modules, "rollout.gateway.gateway", None)
        batch = await runtime.generate([user("one"), user("two", agent_name="wants_a_gateway")])
        assert [each.outcome for each in batch.trajectories] == [Outcome.COMPLETED, Outcome.FAILED]
        cause = batch.trajectories[1].cause
        assert cause is not None
        assert "rollout.gateway.gateway" in cause.message
        again = await runtime.generate([user("three")])
    assert again.trajectories[0].outcome is Outcome.COMPLETED


async def test_reader_attached_after_opening_gets_the_runtimes_counts() -> None:
    sampled: list[RuntimeSampled] = []

    def read(event: object, subject: object) -> None:
        if isinstance(event, RuntimeSampled):
            sampled.append(event)

    async with rollout.open_rollout(SCENARIO.config()) as runtime:
        await anyio.sleep(5)
        runtime.services.events.attach(read)
        await runtime.generate([user("one")])
        await anyio.sleep(2)
    assert sampled[-1].finished == 1
