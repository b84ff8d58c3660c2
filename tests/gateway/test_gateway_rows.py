"""Which rows come out of what clients send, through the gateway over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from harness import Recorder
from http_agents import Client, Program, tried, user
from rollout.testing import Scenario

pytest.importorskip("h11")

if TYPE_CHECKING:
    from rollout import Trajectory

pytestmark = [pytest.mark.anyio, pytest.mark.process]

CHAT = Scenario(seed=3).timing(base_s=0.001).reply("One", "First.").then("Second.").then("Third.")
AGENT = {"x-claude-code-agent-id": "a1"}
TITLE = {"output_config": {"format": {"type": "json_schema", "schema": {}}}}
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc=1"},
    {"type": "text", "text": "You help."},
]


@pytest.fixture
def anyio_backend() -> str:
    """Real sockets, so real time."""
    return "asyncio"


async def rows_of(program: Program, scenario: Scenario = CHAT) -> Trajectory:
    recorder = Recorder()
    trajectory = await tried(recorder.open_rollout, program, scenario)
    assert trajectory.cause is None
    assert recorder.anomalies() == []
    return trajectory


def turns_of(trajectory: Trajectory) -> list[tuple[str, int]]:
    """Of each row its purpose and how many turns it trains."""
    return [(s.purpose, len(list(s.transcript.generated_spans()))) for s in trajectory.segments]


def said(client: Client, *messages: Any, **headers: str) -> Any:
    body = {"model": client.address.model, "messages": list(messages)}
    answer = client.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def output(client: Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/responses", **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_sub_agent_that_comes_first_leaves_the_main_row_to_the_main_agent() -> None:
    def ask(client: Client) -> None:
        said(client, user("One"), **AGENT)
        first = said(client, user("One"))
        said(client, user("One"), first, user("More"))

    assert turns_of(await rows_of(ask)) == [("main", 2), ("subagent", 1)]


async def test_sub_agent_that_continues_the_main_agents_turn_does_not_take_its_row() -> None:
    def ask(client: Client) -> None:
        first = said(client, user("One"))
        said(client, user("One"), first, user("Look."), **AGENT)
        said(client, user("One"), first, user("More"))

    trajectory = await rows_of(ask)
    assert turns_of(trajectory) == [("main", 2), ("subagent", 1)]
    parent = trajectory.segments[1].parent
    assert parent is not None
    assert parent.segment == 0


async def test_side_call_that_comes_first_leaves_the_main_row_and_its_turn() -> None:
    def ask(client: Client) -> None:
        body = {"messages": [user("One")], "system": SYSTEM, "max_tokens": 50}
        assert client.post("/v1/messages", **body, **TITLE).status_code == 200
        first = client.post("/v1/messages", **body).json()
        told = {"role": "assistant", "content": first["content"]}
        further = {"messages": [user("One"), told, user("More")]}
        assert client.post("/v1/messages", **(body | further)).status_code == 200

    assert turns_of(await rows_of(ask)) == [("main", 2), ("side", 1)]


@pytest.mark.parametrize("instructions", [{}, {"instructions": "Be brief."}])
async def test_developer_message_after_a_previous_response_stands_where_it_was_said(
    instructions: dict[str, str],
) -> None:
    told = [{"role": "developer", "content": "Now rhyme."}, user("More")]

    def ask(client: Client) -> None:
        first = output(client, instructions="Be brief.", input="One")
        output(client, previous_response_id=first["id"], input=told, **instructions)

    def ask_in_full(client: Client) -> None:
        first = output(client, instructions="Be brief.", input="One")
        output(client, instructions="Be brief.", input=[user("One"), *first["output"], *told])

    trajectory, in_full = await rows_of(ask), await rows_of(ask_in_full)
    assert turns_of(trajectory) == turns_of(in_full) == [("main", 2)]
    ids = [each.transcript.ids().tolist() for each in (trajectory, in_full)]
    assert ids[0] == ids[1]


async def test_call_of_a_text_tool_is_known_as_it_was_told() -> None:
    given = '{"input": "*** diff", "why": "x"}'
    call = f'<tool_call>\n{{"name": "patch", "arguments": {given}}}\n</tool_call>'
    scenario = Scenario(seed=3).timing(base_s=0.001).reply("One", call).then("Done.")
    tools = [{"type": "custom", "name": "patch", "description": "Applies a patch."}]

    def ask(client: Client) -> None:
        items = output(client, input=[user("One")], tools=tools)["output"]
        answer = {"type": "custom_tool_call_output", "output": "ok"}
        answered = [*items, answer | {"call_id": items[-1]["call_id"]}]
        output(client, input=[user("One"), *answered], tools=tools)

    assert turns_of(await rows_of(ask, scenario)) == [("main", 2)]


async def test_answers_between_the_calls_of_a_turn_do_not_divide_it() -> None:
    calls = "\n".join(
        f'<tool_call>\n{{"name": "f", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in (1, 2)
    )
    scenario = Scenario(seed=3).timing(base_s=0.001).reply("One", calls).then("Done.")
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]

    def ask(client: Client) -> None:
        items: list[Any] = [user("One")]
        for each in output(client, input=items, tools=tools)["output"]:
            answer = {"type": "function_call_output", "output": "ok", "call_id": each["call_id"]}
            items += [each, answer]
        output(client, input=items, tools=tools)

    assert turns_of(await rows_of(ask, scenario)) == [("main", 2)]


PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
SHOWN = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


@pytest.mark.parametrize("is_first", [True, False])
async def test_what_the_model_cannot_read_is_refused_in_the_clients_words(is_first: bool) -> None:
    def ask(client: Client) -> list[Any]:
        if not is_first:
            said(client, user("One"))
        chat = client.chat(user(SHOWN))
        given = {"role": "user", "content": [PICTURE]}
        responses = client.post("/v1/responses", instructions="Look.", input=[given])
        long = client.post("/v1/responses", input="x" * 5000)
        if is_first:
            said(client, user("One"))
        return [each.json()["error"] for each in (chat, responses, long)]

    chat, responses, long = (await rows_of(ask)).extra["result"]
    why = "(user): content[0]: only parts of type 'text' are understood, not 'image'"
    assert chat["message"].startswith(f"messages[0] {why}")
    assert responses["message"].startswith(f"input {why}")
    assert [chat["param"], responses["param"], long["param"]] == ["messages", "input", "input"]
    assert long["code"] == "context_length_exceeded"


async def test_client_that_leaves_before_its_answer_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = Scenario(seed=3).reply("One", "x" * 200).timing(base_s=0.05, slope_s=0)

    def ask(client: Client) -> None:
        with pytest.raises(httpx.ReadTimeout):
            client.http.post("/v1/chat/completions", json={"messages": [user("One")]}, timeout=0.2)

    await rows_of(ask, slow)
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []
