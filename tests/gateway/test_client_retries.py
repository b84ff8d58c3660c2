"""Retries that say so: behind a proxy that swallowed the answer they get the same answer."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import msgspec
import pytest

from gateway_clients import asked, echo, tried, user
from harness import Recorder
from http_agents import Client
from http_agents import tried as tried_over_http
from rollout import AgentContext, Outcome
from rollout.config import GatewayConfig
from rollout.gateway.calls import GatewayCall
from rollout.gateway.session import GatewaySession
from rollout.testing import Scenario

pytest.importorskip("h11")

pytestmark = pytest.mark.anyio

HELLO = Scenario(seed=1).reply("question", filler=30)
RETRY = "x-stainless-retry-count"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "question"}]},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "question messages"}],
        "max_tokens": 60,
    },
    "/v1/responses": {"input": "question responses"},
}


@pytest.fixture
def anyio_backend(anyio_backend: Any, request: pytest.FixtureRequest) -> Any:
    """Real time where sockets are real."""
    return "asyncio" if "over_http" in request.node.name else anyio_backend


def post(client: Client, path: str, count: str | None, **body: Any) -> httpx.Response:
    """As an SDK sends it; whoever stands between them reads the whole answer."""
    headers = {} if count is None else {RETRY: count}
    sent = {"model": client.address.model, **BODIES[path], **body}
    answer = client.http.post(path, json=sent, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_retry_over_http_replays_the_answer(is_streamed: bool) -> None:
    def program(client: Client) -> None:
        for path in BODIES:
            first, *again = [
                post(client, path, count, stream=is_streamed) for count in ("0", "1", "2")
            ]
            for each in again:
                assert _said(each, is_streamed) == _said(first, is_streamed)

    trajectory = await tried_over_http(Recorder().open_rollout, program, HELLO)
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert len(trajectory.segments) == len(BODIES)
    assert [len(list(s.transcript.generated_spans())) for s in trajectory.segments] == [1, 1, 1]


def _said(answer: httpx.Response, is_streamed: bool) -> Any:
    """What an answer says: its whole text where it is streamed, in whatever pieces."""
    if not is_streamed:
        return {key: value for key, value in answer.json().items() if "created" not in key}
    lines = [each[6:] for each in answer.text.splitlines() if each.startswith("data: {")]
    events = [msgspec.json.decode(each) for each in lines]
    texts = [_delta(each) for each in events]
    return "".join(texts), events[0].get("id")


def _delta(event: dict[str, Any]) -> str:
    choices = event.get("choices")
    if choices is not None:
        return str(choices[0]["delta"].get("content") or "") if choices else ""
    delta = event.get("delta")
    return str(delta.get("text", "") if isinstance(delta, dict) else delta or "")


async def test_request_over_http_that_is_no_retry_is_a_new_sample() -> None:
    def program(client: Client) -> int:
        counts = (None, None, "0", "0", "", "many", "-1")
        path = "/v1/chat/completions"
        return len({post(client, path, count).json()["id"] for count in counts})

    trajectory = await tried_over_http(Recorder().open_rollout, program, HELLO)
    assert trajectory.extra["result"] == len(trajectory.segments) == 7


async def test_retry_over_http_of_another_sub_agent_gets_no_answer_of_its_sibling() -> None:
    def program(client: Client) -> int:
        path, ids = "/v1/chat/completions", set()
        for agent, count in (("a", "0"), ("b", "1")):
            headers = {RETRY: count, "x-openai-subagent": agent}
            ids.add(client.http.post(path, json=BODIES[path], headers=headers).json()["id"])
        return len(ids)

    trajectory = await tried_over_http(Recorder().open_rollout, program, HELLO)
    assert trajectory.extra["result"] == 2


def retry_of(call: GatewayCall) -> GatewayCall:
    return msgspec.structs.replace(call, is_retry=True)


async def test_retry_of_what_never_came_is_sampled() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        first = await session.complete(retry_of(asked(user("question"))))
        told = user("question"), echo(first.answers[0]), user("more")
        second = await session.complete(asked(*told))
        # Somebody has the first answer and goes on from it: this is another request's retry.
        other = await session.complete(retry_of(asked(user("question"))))
        assert len({each.id for each in (first, second, other)}) == 3
        assert await session.complete(retry_of(asked(*told))) == second

    assert (await tried(trial, HELLO)).purposes == ["main", "branch"]


async def test_retries_of_equal_requests_get_an_answer_each() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        call = asked(user("question"))
        answers = [await session.complete(call) for _ in range(3)]
        assert len({each.id for each in answers}) == 3
        assert await session.complete(retry_of(call)) == answers[2]  # the last is the likeliest
        others = [await session.complete(retry_of(call)) for _ in range(2)]
        assert {each.id for each in others} == {answers[0].id, answers[1].id}

    assert (await tried(trial, HELLO)).purposes == ["main", "branch", "branch"]


async def test_retry_replays_all_samples_and_counts_once() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        call = asked(user("question"), n=3)
        first = await session.complete(call)
        for _ in range(3):
            assert await session.complete(retry_of(call)) == first

    found = await tried(trial, HELLO, settings=GatewayConfig(max_calls=1))
    assert found.trajectory.outcome is Outcome.COMPLETED
    assert found.purposes == ["main", "branch", "branch"]


async def test_retry_while_the_first_generates_is_a_sample_of_its_own() -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        call, answers = asked(user("question")), []

        async def ask(call: GatewayCall) -> None:
            answers.append(await session.complete(call))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, call)
            await anyio.sleep(0.01)
            tasks.start_soon(ask, retry_of(call))
        assert len({each.id for each in answers}) == 2

    assert (await tried(trial, HELLO)).purposes == ["main", "branch"]
