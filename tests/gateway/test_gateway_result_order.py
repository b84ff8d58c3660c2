"""Results of tools that clients of the gateway give: in the order of their calls."""

from __future__ import annotations

from typing import Any

import pytest

import rollout
from harness import Recorder
from http_agents import Client, tried, user
from rollout import Outcome, Prompt
from rollout.config import AgentConfig
from rollout.testing import Scenario, tool_call

pytest.importorskip("h11")

pytestmark = pytest.mark.anyio

BOTH = tool_call("add", a=1, b=2) + "\n" + tool_call("add", a=3, b=4)
SCENARIO = Scenario(seed=1).timing(base_s=0.001).reply("go", BOTH).then("Done.")


TOOL = {"name": "add", "parameters": {"type": "object"}}


class Chat:
    """How chat completions tell two calls of a turn and their results."""

    path, asks = "/v1/chat/completions", "go chat"

    def body(self, turn: Any, results: list[tuple[str, str]]) -> dict[str, Any]:
        told = [{"role": "tool", "tool_call_id": i, "content": text} for i, text in results]
        rest = [] if turn is None else [turn, *told]
        tools = [{"type": "function", "function": TOOL}]
        return {"messages": [user(self.asks), *rest], "tools": tools}

    def turn(self, answer: Any) -> tuple[Any, list[str]]:
        message = answer["choices"][0]["message"]
        return message, [each["id"] for each in message["tool_calls"]]


class Messages:
    """The same in Anthropic's messages."""

    path, asks = "/v1/messages", "go messages"

    def body(self, turn: Any, results: list[tuple[str, str]]) -> dict[str, Any]:
        told = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in results]
        rest = [] if turn is None else [turn, {"role": "user", "content": told}]
        tools = [{"name": "add", "input_schema": TOOL["parameters"]}]
        return {"messages": [user(self.asks), *rest], "tools": tools, "max_tokens": 500}

    def turn(self, answer: Any) -> tuple[Any, list[str]]:
        uses = [each for each in answer["content"] if each["type"] == "tool_use"]
        turn = {"role": "assistant", "content": answer["content"]}
        return turn, [each["id"] for each in uses]


class Responses:
    """The same in responses."""

    path, asks = "/v1/responses", "go responses"

    def body(self, turn: Any, results: list[tuple[str, str]]) -> dict[str, Any]:
        told = [{"type": "function_call_output", "call_id": i, "output": t} for i, t in results]
        rest = [] if turn is None else [*turn, *told]
        return {"input": [user(self.asks), *rest], "tools": [{"type": "function", **TOOL}]}

    def turn(self, answer: Any) -> tuple[Any, list[str]]:
        calls = [each for each in answer["output"] if each["type"] == "function_call"]
        return answer["output"], [each["call_id"] for each in calls]


class Named(Responses):
    """The same, which names the answer before in place of saying it again."""

    asks = "go named"

    def body(self, turn: Any, results: list[tuple[str, str]]) -> dict[str, Any]:
        body = super().body([] if turn is not None else None, results)
        if turn is None:
            return body
        return body | {"input": body["input"][1:], "previous_response_id": turn}

    def turn(self, answer: Any) -> tuple[Any, list[str]]:
        return answer["id"], super().turn(answer)[1]


APIS: list[Any] = [Chat(), Messages(), Responses(), Named()]


@pytest.fixture
def anyio_backend() -> str:
    """Real sockets, so real time."""
    return "asyncio"


async def test_gateway_results_stand_in_the_order_of_their_calls() -> None:
    """Asked again in another order, it is the same place: a branch departs there."""

    def program(client: Client) -> None:
        for api in APIS:
            turn, ids = api.turn(client.post(api.path, **api.body(None, [])).json())
            results = [(ids[1], "two"), (ids[0], "one")]
            read = []
            for told in (results, results[::-1]):
                body = api.body(turn, told) | {"return_token_ids": True}
                answered = client.post(api.path, **body)
                assert answered.status_code == 200, answered.text
                read.append(answered.json()["prompt_token_ids"])
            assert read[0] == read[1]

    trajectory = await tried(Recorder().open_rollout, program, SCENARIO)
    assert trajectory.cause is None
    rows = trajectory.segments
    assert len(rows) == 2 * len(APIS)
    for main, branch in zip(rows[::2], rows[1::2], strict=True):
        assert branch.parent is not None
        assert branch.parent.position == main.transcript.spans[2].stop
        for each in (main, branch):
            texts = [str(m.content) for m in each.messages if m.role == "tool"]
            assert texts == ["one", "two"]


async def test_gateway_results_that_are_missing_or_doubled_are_refused() -> None:
    def program(client: Client) -> None:
        for api in APIS:
            turn, ids = api.turn(client.post(api.path, **api.body(None, [])).json())
            one, two = (ids[0], "one"), (ids[1], "two")
            cases = [
                ([one, ("other", "?")], "other"),
                ([one, two, one], ids[0]),
                ([two], ids[0]),
            ]
            for results, named in cases:
                for is_streamed in (False, True):
                    body = api.body(turn, results) | {"stream": is_streamed}
                    answered = client.post(api.path, **body)
                    assert answered.status_code == 400, answered.text
                    assert repr(named) in answered.json()["error"]["message"]
            answered = client.post(api.path, **api.body(turn, [two, one]))
            assert answered.status_code == 200, answered.text

    trajectory = await tried(Recorder().open_rollout, program, SCENARIO)
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert len(trajectory.segments) == len(APIS)


def foreign(*ids: str) -> dict[str, Any]:
    """A turn that the model never said."""
    function = {"name": "add", "arguments": "{}"}
    calls = [{"id": each, "type": "function", "function": function} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


async def test_gateway_history_of_a_client_stands_in_the_order_of_its_calls() -> None:
    """Ids count for one turn: the next may use them again."""
    one, two = result("a", "one"), result("b", "two")

    def program(client: Client) -> Any:
        first, last = [user("go"), foreign("a", "b")], foreign("b", "a")
        histories = ([*first, two, one, last, one, two], [*first, one, two, last, two, one])
        read = [client.chat(*each, return_token_ids=True).json() for each in histories]
        assert read[0]["prompt_token_ids"] == read[1]["prompt_token_ids"]
        doubled = client.chat(user("go"), foreign("a", "a"), one, one)
        counted = client.post(
            "/v1/messages/count_tokens",
            messages=[
                user("go"),
                {"role": "assistant", "content": [_use("a"), _use("b")]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b"}]},
            ],
        )
        return [(each.status_code, each.json()["error"]["message"]) for each in (doubled, counted)]

    trajectory = await tried(Recorder().open_rollout, program, SCENARIO)
    assert trajectory.cause is None
    texts = [str(each.content) for each in trajectory.messages if each.role == "tool"]
    assert texts == ["one", "two", "two", "one"]
    (doubled, why), (counted, what) = trajectory.extra["result"]
    assert (doubled, why) == (400, "messages[1]: two of its calls have the id 'a'")
    assert (counted, what) == (
        400,
        "messages: no result of the call 'a'; expected one of each call",
    )


def _use(call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "add", "input": {}}


async def test_function_agent_is_given_results_in_the_order_of_their_calls() -> None:
    @rollout.agent("reads_its_messages")
    async def reads(task: rollout.AgentTask) -> None:
        task.extra["ids"] = [each.get("tool_call_id") for each in task.messages]

    messages = [user("go"), foreign("a", "b"), result("b", "two"), result("a", "one")]
    config = SCENARIO.config(agent=AgentConfig(name="reads_its_messages"))
    async with Recorder().open_rollout(config) as runtime:
        (trajectory,) = (await runtime.generate([Prompt(messages=messages)])).trajectories
    assert trajectory.extra["ids"] == [None, None, "a", "b"]
