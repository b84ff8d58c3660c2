"""What the official clients make of refusals: the right exception, and no second attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pytest
from through_gateway import opened, run

from rollout.agents import AgentTask
from rollout.config import LengthsConfig
from rollout.testing import Scenario
from rollout.types import Outcome

pytestmark = pytest.mark.anyio

HELLO: Any = [{"role": "user", "content": "Hello?"}]
LONG: Any = [{"role": "user", "content": "Hello? " * 1000}]
SHORT = LengthsConfig(prompt=1000, response=1000)


class Clients:
    """Both, with the number of requests that they made."""

    def __init__(self, task: AgentTask, key: str | None = None) -> None:
        self.requests = 0
        hooks: Any = {"request": [self._count]}
        key = key or task.api_key
        self.openai = openai.OpenAI(
            base_url=task.base_url,
            api_key=key,
            http_client=openai.DefaultHttpxClient(event_hooks=hooks),
        )
        self.anthropic = anthropic.Anthropic(
            base_url=task.root_url,
            api_key=key,
            http_client=anthropic.DefaultHttpxClient(event_hooks=hooks),
        )

    def _count(self, request: object) -> None:
        self.requests += 1


@contextmanager
def clients(task: AgentTask, key: str | None = None) -> Iterator[Clients]:
    made = Clients(task, key)
    with made.openai, made.anthropic:
        yield made


def chat(made: Clients, messages: Any, stream: bool) -> Any:
    return made.openai.chat.completions.create(model="rollout", messages=messages, stream=stream)


def responses(made: Clients, messages: Any, stream: bool) -> Any:
    return made.openai.responses.create(model="rollout", input=messages, stream=stream)


def messages(made: Clients, messages: Any, stream: bool) -> Any:
    return made.anthropic.messages.create(
        model="rollout", max_tokens=64, messages=messages, stream=stream
    )


Ask = Callable[[Clients, Any, bool], Any]
ASKS = pytest.mark.parametrize("ask", [chat, responses, messages])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def refusal(made: Clients, ask: Ask, streamed: bool, given: Any = HELLO) -> Any:
    """The error of a request that was made once."""
    before = made.requests
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as raised:
        ask(made, given, streamed)
    assert made.requests == before + 1
    return raised.value


@ASKS
@STREAMED
async def test_key_of_another_trajectory_is_a_permission_error(ask: Ask, streamed: bool) -> None:
    keys: list[str] = []

    def hand_over(task: AgentTask) -> None:
        keys.append(task.api_key)

    def program(task: AgentTask) -> Any:
        with clients(task, keys[0]) as made:
            return refusal(made, ask, streamed)

    async with opened(Scenario()) as gatewayed:
        await gatewayed.roll(hand_over)
        (trajectory,) = (await gatewayed.roll(program)).trajectories
        assert gatewayed.sampled() == []
    error = trajectory.extra["result"]
    assert isinstance(error, openai.PermissionDeniedError | anthropic.PermissionDeniedError)
    assert "the key is that of another trajectory" in str(error)


@ASKS
@STREAMED
async def test_limit_of_calls_ends_the_trajectory_with_a_final_error(
    ask: Ask, streamed: bool
) -> None:
    def program(task: AgentTask) -> Any:
        with clients(task) as made:
            for _ in range(2):
                ask(made, HELLO, False)
            return [refusal(made, ask, streamed) for _ in range(2)]

    done = await run(program, Scenario(), max_calls=2)
    done.assert_exact("main", "branch")
    assert (done.trajectory.outcome, done.trajectory.limit_source) == (
        Outcome.LIMIT,
        "gateway.max_calls",
    )
    for error in done.result:
        assert isinstance(error, openai.PermissionDeniedError | anthropic.PermissionDeniedError)
        assert "gateway.max_calls" in str(error) or "the trajectory has ended" in str(error)


@ASKS
@STREAMED
async def test_over_long_prompt_has_the_code_that_agents_compact_on(
    ask: Ask, streamed: bool
) -> None:
    """It ends nothing: a shorter one is served."""

    def program(task: AgentTask) -> Any:
        with clients(task) as made:
            error = refusal(made, ask, streamed, LONG)
            ask(made, HELLO, False)
            return error

    done = await run(program, Scenario(), lengths=SHORT)
    done.assert_exact("main")
    error = done.result
    if isinstance(error, openai.BadRequestError):
        assert error.code == "context_length_exceeded"
    else:
        assert isinstance(error, anthropic.BadRequestError)
        assert "prompt is too long" in str(error)
