"""Streamed answers over HTTP: what clients get while the model speaks, and what at the end."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
from anyio.to_thread import run_sync

from fake_sessions import KEY, PATH, FakeSession, answer, served
from fake_sessions import ask_officially as ask
from rollout.gateway.calls import GatewayError
from rollout.types import ToolCall
from slow_cases import slow_but

pytest.importorskip("h11")

if TYPE_CHECKING:
    from rollout.gateway.calls import Answer

pytestmark = [pytest.mark.anyio, pytest.mark.process]

ASKED = [{"role": "user", "content": "2 + 2?"}]
CALL = ToolCall(name="add", arguments={"a": 1, "b": "ü"}, id="call-1", raw="")
SAID = answer(
    text="Well, I would äd\n\nthat.",
    reasoning="Hm.\nFour?",
    calls=(CALL,),
    finish="calls",
)
BODIES = {
    "chat/completions": {"messages": ASKED, "stream": True},
    "responses": {"input": "2 + 2?", "stream": True},
    "messages": {"messages": ASKED, "stream": True},
}
APIS = sorted(BODIES)


@pytest.fixture(params=slow_but(["trio", "asyncio"], "trio"))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real sockets, so real time."""
    return str(request.param)


def speaking(*script: Answer | Exception, pause_s: float = 0.0) -> FakeSession:
    session = FakeSession(PATH, KEY)
    session.script.extend(script)
    session.pause_s = pause_s
    return session


def chat(o: Any, _: Any) -> Any:
    thought = said = 0
    options = {"include_usage": True}
    with o.chat.completions.stream(
        model="rollout", messages=ASKED, stream_options=options, logprobs=True
    ) as events:
        for each in events:
            if each.type == "chunk" and each.chunk.choices:
                delta = each.chunk.choices[0].delta
                thought += bool((delta.model_extra or {}).get("reasoning_content"))
                said += bool(delta.content)
        whole = events.get_final_completion()
    (choice,) = whole.choices
    call = choice.message.tool_calls[0].function
    told = choice.message.reasoning_content, choice.message.content, (call.name, call.arguments)
    assert choice.finish_reason == "tool_calls"
    assert len(choice.logprobs.content) == 3
    return told, thought, said, whole.usage.prompt_tokens


def responses(o: Any, _: Any) -> Any:
    thought = said = 0
    items = []
    with o.responses.stream(
        model="rollout", input="2 + 2?", include=["message.output_text.logprobs"]
    ) as events:
        for number, each in enumerate(events):
            assert each.sequence_number == number
            thought += each.type == "response.reasoning_summary_text.delta"
            said += each.type == "response.output_text.delta"
            if each.type == "response.output_item.done":
                assert each.output_index == len(items)
                items.append(each.item)
        whole = events.get_final_response()
    told, done = (
        (mind.content[0].text, message.content[0].text, (call.name, call.arguments))
        for mind, message, call in (whole.output, items)
    )
    assert told == done
    assert [each.id for each in items] == [each.id for each in whole.output]
    assert items[0].summary[0].text == told[0]
    assert [each.logprob for each in items[1].content[0].logprobs] == [-0.5, -0.25, -1.0]
    return told, thought, said, whole.usage.input_tokens


def messages(_: Any, a: Any) -> Any:
    thought = said = 0
    with a.messages.stream(model="rollout", max_tokens=9, messages=ASKED) as events:
        for each in events:
            thought += each.type == "thinking"
            said += each.type == "text"
        whole = events.get_final_message()
    mind, text, call = whole.content
    assert (mind.signature, whole.stop_reason) == ("answer-0", "tool_use")
    arguments = json.dumps(call.input, separators=(",", ":"), ensure_ascii=False)
    told = mind.thinking, text.text, (call.name, arguments)
    return told, thought, said, whole.usage.input_tokens + whole.usage.cache_read_input_tokens


READERS = {"chat/completions": chat, "responses": responses, "messages": messages}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("keep_alive_s", [15.0, 0.01])
async def test_stream_is_one_delta_a_part_of_the_turn(api: str, keep_alive_s: float) -> None:
    session = speaking(SAID, pause_s=0.1)
    told, thought, said, read = await ask(session, READERS[api], keep_alive_s=keep_alive_s)
    assert told == (SAID.reasoning, SAID.text, ("add", '{"a":1,"b":"ü"}'))
    assert (thought, said, read) == (1, 1, 4)


@pytest.mark.parametrize("api", APIS)
async def test_answer_that_is_not_streamed_has_white_space_before_it_while_it_is_made(
    api: str,
) -> None:
    session = speaking(answer(text="Four."), pause_s=0.3)
    async with served(session, keep_alive_s=0.05) as url:
        host, port = url.removeprefix("http://").split(":")
        request = request_of(api, 1, stream=False)
        reply = await run_sync(cut_reply, (host, int(port)), request, None)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    text = b"".join(body.split(b"\r\n")[1::2])
    assert text.startswith(b"  ")
    assert "Four." in json.dumps(json.loads(text))


@pytest.mark.parametrize("api", APIS)
async def test_error_after_white_space_is_the_body(api: str) -> None:
    session = speaking(GatewayError(400, "engine", "the engine is gone"), pause_s=0.2)
    async with served(session, keep_alive_s=0.05) as url:
        host, port = url.removeprefix("http://").split(":")
        request = request_of(api, 1, stream=False)
        reply = await run_sync(cut_reply, (host, int(port)), request, None)
    text = b"".join(reply.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])
    assert json.loads(text)["error"]["message"] == "the engine is gone"


#: Ends a reply that came in pieces.
LAST = b"\r\n0\r\n\r\n"


def is_whole(reply: bytes) -> bool:
    """Whether it ends, in pieces or with a length."""
    return reply.endswith(LAST) or (b"content-length" in reply and reply.endswith(b"\n\n"))


def request_of(api: str, number: int, *, stream: bool = True) -> bytes:
    body = json.dumps(BODIES[api] | {"user": f"{number:05}", "stream": stream})
    head = (
        f"POST /t/{PATH}/v1/{api} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


def cut_reply(address: tuple[str, int], request: bytes, count: int | None) -> bytes:
    """Take so many bytes of a reply, or all of it where it has fewer, and close."""
    with socket.create_connection(address, timeout=10) as sock:
        sock.sendall(request)
        got = b""
        while (count is None or len(got) < count) and not is_whole(got):
            more = sock.recv(4096 if count is None else count - len(got))
            assert more
            got += more
        return got
