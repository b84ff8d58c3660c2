"""A gateway's sessions without HTTP: which rows come of which calls, and what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gateway_clients import ADD, ask, echo, result, system, tried, user
from rollout import Outcome
from rollout.testing import Scenario, tool_call

if TYPE_CHECKING:
    from rollout import AgentContext
    from rollout.gateway.sessions import GatewaySession

pytestmark = pytest.mark.anyio

CALLS = (
    Scenario(seed=1)
    .reply("Add 2 and 3", "I add. " + tool_call("add", a=2, b=3))
    .then("It is 5.")
    .then("You are welcome.")
)


async def test_session_linear_conversation_is_one_row() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        messages = [system("Be brief."), user("Add 2 and 3")]
        (first,) = (await ask(session, *messages, tools=(ADD,))).answers
        assert (first.text, first.finish) == ("I add.", "calls")
        (call,) = first.calls
        assert (call.name, call.arguments) == ("add", {"a": 2, "b": 3})
        messages += [echo(first), result("5", call.id)]
        second = await ask(session, *messages, tools=(ADD,))
        assert second.answers[0].text == "It is 5."
        messages += [echo(second.answers[0]), user("Thanks")]
        third = await ask(session, *messages, tools=(ADD,))
        assert (third.answers[0].text, third.answers[0].finish) == ("You are welcome.", "stop")
        transcript = context.transcript
        assert third.prompt_ids == transcript.prefix.slice(0, len(third.prompt_ids))
        assert third.answers[0].ids == transcript.prefix.slice(len(third.prompt_ids))

    found = await tried(trial, CALLS)
    trajectory = found.trajectory
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert found.purposes == ["main"]
    kinds = [span.kind for span in trajectory.transcript.spans]
    assert kinds == ["prompt", "generated", "observation", "generated", "observation", "generated"]
    roles = [message.role for message in trajectory.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert '"name": "add"' in found.text(0).partition("<|im_end|>")[0]
