"""Clients of the gateway that are slow, greedy, lost or gone."""

from __future__ import annotations

import json
import re
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import httpx
import pytest

from fake_sessions import KEY, PATH, FakeSession, answer, served
from slow_cases import slow_but

pytest.importorskip("h11")

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = [pytest.mark.anyio, pytest.mark.process]

ASKED = {"model": "rollout", "messages": [{"role": "user", "content": "2 + 2?"}]}
STREAMED = ASKED | {"stream": True}
KEYED = {"authorization": f"Bearer {KEY}"}
CHAT = f"/t/{PATH}/v1/chat/completions"
MESSAGES = f"/t/{PATH}/v1/messages"
CREATED = re.compile(rb'(?<="created":)\d+|(?<="created_at":)\d+')
RESPONSES = f"/t/{PATH}/v1/responses"


@pytest.fixture(params=slow_but(["trio", "asyncio"], "trio"))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real sockets, so real time."""
    return str(request.param)


@asynccontextmanager
async def stream_of(**settings: Any) -> AsyncIterator[anyio.abc.ByteStream]:
    """A connection to a server with one session."""
    async with client_of(FakeSession(PATH, KEY), **settings) as client:
        async with await anyio.connect_tcp(*address_of(client)) as stream:
            yield stream


@asynccontextmanager
async def client_of(*sessions: FakeSession, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with served(*sessions, **settings) as url:
        async with httpx.AsyncClient(
            base_url=url, timeout=10, trust_env=False, verify=False
        ) as client:
            yield client


def called(arguments: Any) -> dict[str, Any]:
    """A message of chat with one call."""
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def used(arguments: Any) -> dict[str, Any]:
    """A call as a block of messages."""
    return {"type": "tool_use", "id": "c", "name": "f", "input": arguments}


def address_of(client: httpx.AsyncClient) -> tuple[str, int]:
    assert client.base_url.port is not None
    return client.base_url.host, client.base_url.port


def request_of(body: bytes, path: str = CHAT, length: int | None = None) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {length or len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not holds():
            await anyio.sleep(0.002)


async def all_of(stream: anyio.abc.ByteReceiveStream) -> bytes:
    got = b""
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        while True:
            got += await stream.receive()
    return got


async def test_key_of_another_trajectory_is_refused() -> None:
    one, two = FakeSession(PATH, KEY), FakeSession("path-two", "key-two")
    async with client_of(one, two) as client:
        for headers in ({}, {"x-api-key": "key-two"}, {"authorization": "Basic x"}):
            got = await client.post(CHAT, json=ASKED, headers=headers)
            assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
            assert got.headers["x-should-retry"] == "false"
        got = await client.post(MESSAGES, json=ASKED, headers={"x-api-key": "key-two"})
        assert got.json()["error"]["type"] == "authentication_error"
        got = await client.post(CHAT, json=ASKED, headers={"x-api-key": KEY})
        assert got.status_code == 200
    assert (len(one.calls), two.calls) == (1, [])


async def test_path_that_is_none_and_wrong_method_are_final() -> None:
    async with client_of(FakeSession(PATH, KEY)) as client:
        got = await client.post("/t/nowhere/v1/messages", json=ASKED, headers=KEYED)
        assert (got.status_code, got.json()["error"]["type"]) == (404, "not_found_error")
        got = await client.post(f"/t/{PATH}/v2/chat", json=ASKED, headers=KEYED)
        assert (got.status_code, got.headers["x-should-retry"]) == (404, "false")
        got = await client.get(CHAT, headers=KEYED)
        assert (got.status_code, got.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_head_of_a_base_url_is_answered() -> None:
    async with client_of(FakeSession(PATH, KEY)) as client:
        for path in ("/", f"/t/{PATH}", f"/t/{PATH}/"):
            assert (await client.head(path)).status_code == 200


async def test_body_past_its_bound_is_refused_before_it_is_read() -> None:
    session = FakeSession(PATH, KEY)
    async with client_of(session) as client:
        async with await anyio.connect_tcp(*address_of(client)) as stream:
            await stream.send(request_of(b"{", length=100_000_000))
            got = await received(stream)
        assert got.startswith(b"HTTP/1.1 413 ")
        assert b"gateway.max_body_bytes = 33554432" in got
        reply = await client.post(CHAT, content=b" " * 40_000_000, headers=KEYED)
        assert reply.status_code == 413
    assert session.calls == []


async def test_body_without_a_length_is_refused_once_it_is_too_long() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    async with client_of(FakeSession(PATH, KEY), max_body_bytes=50_000) as client:
        got = await client.post(CHAT, content=chunks(), headers=KEYED)
        assert got.status_code == 413
        padded = json.dumps(ASKED).encode() + b" " * 40_000
        assert (await client.post(CHAT, content=padded, headers=KEYED)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"tools": ' + b"[" * 100_000,
        b'{"x": ' + b'{"x":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
    ],
    ids=["list", "cut", "no-utf8", "deep-tools", "deep-unknown"],
)
async def test_broken_or_deep_json_is_a_bad_request(body: bytes) -> None:
    session = FakeSession(PATH, KEY)
    async with client_of(session) as client:
        got = await client.post(CHAT, content=body, headers=KEYED)
    assert (got.status_code, got.headers["x-should-retry"]) == (400, "false")
    assert got.json()["error"]["type"] == "invalid_request_error"
    assert session.calls == []


async def test_deep_arguments_and_schemas_are_refused_by_name() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {"a": deep}
    told = [called(json.dumps(deep))]
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    async with client_of(FakeSession(PATH, KEY)) as client:
        got = await client.post(CHAT, json=ASKED | {"messages": told}, headers=KEYED)
        assert got.json()["error"]["param"] == "messages[0].tool_calls[0].function.arguments"
        got = await client.post(CHAT, json=ASKED | {"tools": tools}, headers=KEYED)
        assert got.json()["error"]["param"] == "tools[0].function.parameters"
        said = [{"role": "assistant", "content": [used(deep)]}]
        got = await client.post(MESSAGES, json=ASKED | {"messages": said}, headers=KEYED)
        assert "nested too deeply" in got.json()["error"]["message"]


async def test_requests_of_too_many_messages_calls_or_images_are_refused_by_name() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f"}}
    many: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 20_000}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [image] * 2000}] * 6}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [call] * 10_000}]}, "messages"),
        (CHAT, ASKED | {"tools": [tool] * 2000}, "tools"),
        (RESPONSES, {"input": [{"role": "user", "content": ""}] * 20_000}, "input"),
    ]
    async with client_of(FakeSession(PATH, KEY)) as client:
        for route, body, field in many:
            got = await client.post(route, json={"model": "rollout"} | body, headers=KEYED)
            assert got.status_code == 400
            assert field in got.json()["error"]["message"]
            assert "10,000" in got.text or "1024" in got.text


MANY = {"a": [[]] * 200_000}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ASKED | {"tools": [{"function": {"name": "f", "parameters": MANY}}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": ""}] * 200_000}]}),
        (CHAT, {"messages": [called(json.dumps([0] * 40_000))] * 10}),
        (RESPONSES, {"input": [{"type": "function_call", "arguments": json.dumps(MANY)}]}),
    ],
    ids=["schema", "parts", "texts", "item"],
)
async def test_more_json_values_than_are_allowed_are_refused(
    path: str, body: dict[str, Any]
) -> None:
    session = FakeSession(PATH, KEY)
    async with client_of(session) as client:
        got = await client.post(path, json={"model": "rollout"} | body, headers=KEYED)
    assert got.status_code == 400
    assert got.json()["error"]["message"] == "expected at most 300,000 JSON values"
    assert session.calls == []


async def test_long_texts_are_one_value_each() -> None:
    session = FakeSession(PATH, KEY)
    content = '1,[{"\\,"\\",' * 200_000
    said = [{"role": "user", "content": content}, called(json.dumps({"file": content}))]
    async with client_of(session) as client:
        got = await client.post(CHAT, json=ASKED | {"messages": said}, headers=KEYED)
    assert got.status_code == 200
    (call,) = session.calls
    assert [call.messages[0].text, call.messages[1].calls[0].arguments["file"]] == [content] * 2


def nest(space: str) -> dict[str, Any]:
    tools = [{"type": "custom", "name": f"f{at}"} for at in range(600)]
    return {"type": "namespace", "name": space, "tools": tools}


@pytest.mark.parametrize(
    ("path", "tools", "field"),
    [
        (MESSAGES, [{"name": "", "input_schema": {}}], "tools[0].name"),
        (CHAT, [{"function": {"name": "f"}}] * 2, "tools"),
        (RESPONSES, [{"type": "custom"}], "tools[0].name"),
        (RESPONSES, [nest("one"), nest("two")], "tools"),
    ],
)
async def test_tools_that_cannot_be_are_refused_by_name(path: str, tools: Any, field: str) -> None:
    async with client_of(FakeSession(PATH, KEY)) as client:
        body = ASKED | {"input": "2 + 2?", "tools": tools}
        got = await client.post(path, json=body, headers=KEYED)
    assert got.status_code == 400
    assert got.json()["error"]["message"].startswith(f"{field}: ")


async def test_encoded_body_is_refused() -> None:
    async with client_of(FakeSession(PATH, KEY)) as client:
        headers = KEYED | {"content-encoding": "gzip"}
        got = await client.post(CHAT, content=b"x", headers=headers)
        assert (got.status_code, "content-encoding" in got.text) == (400, True)


async def test_slow_heads_are_ended_and_siblings_do_not_notice() -> None:
    async with client_of(FakeSession(PATH, KEY), head_s=0.3) as client:
        async with anyio.create_task_group() as tasks:
            ended: list[bytes] = []

            async def crawl(first: bytes) -> None:
                async with await anyio.connect_tcp(*address_of(client)) as stream:
                    with suppress(anyio.BrokenResourceError):
                        await stream.send(first)
                    ended.append(await all_of(stream))

            for first in (b"POST / HTTP/1.1\r\nx: ", b"\r\n", b"P"):
                tasks.start_soon(crawl, first)
            for _ in range(20):
                got = await client.post(CHAT, json=ASKED, headers=KEYED)
                assert got.status_code == 200
        assert sorted(each[:12] for each in ended) == [b"HTTP/1.1 400"] * 3


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_part_whose_type_is_misspelled_is_refused_and_not_left_out(path: str) -> None:
    image = {"typ": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    asked = [{"role": "user", "content": [{"text": "what is this?"}, image]}]
    session = FakeSession(PATH, KEY)
    async with client_of(session) as client:
        body = {"input" if path == RESPONSES else "messages": asked, "max_tokens": 9}
        got = await client.post(path, json=body, headers=KEYED)
    assert got.status_code == 400
    assert "content[1].type: '': only text and images are served" in got.json()["error"]["message"]
    assert session.calls == []


@pytest.mark.parametrize(("size", "status"), [(60_000, b"200"), (70_000, b"400")])
async def test_head_that_comes_at_once_is_bounded_too(size: int, status: bytes) -> None:
    async with stream_of() as stream:
        await stream.send(b"HEAD / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * size + b"\r\n\r\n")
        got = await stream.receive()
    assert got.startswith(b"HTTP/1.1 " + status)
    assert (b"Request head too large." in got) is (status == b"400")


async def test_drip_of_headers_does_not_put_the_end_off() -> None:
    async with stream_of(head_s=0.3) as stream:
        with anyio.fail_after(5), suppress(anyio.BrokenResourceError):
            await stream.send(b"POST / HTTP/1.1\r\n")
            while True:
                await stream.send(b"x: y\r\n")
                await anyio.sleep(0.05)


async def test_silent_connection_is_closed() -> None:
    async with client_of(FakeSession(PATH, KEY), head_s=0.1, idle_s=0.1) as client:
        async with await anyio.connect_tcp(*address_of(client)) as stream:
            assert await all_of(stream) == b""
        async with await anyio.connect_tcp(*address_of(client)) as stream:
            await stream.send(request_of(json.dumps(ASKED).encode()))
            assert (await all_of(stream)).startswith(b"HTTP/1.1 200 ")


async def test_client_that_wants_its_connection_closed_is_answered_and_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = request_of(json.dumps(ASKED).encode())
    async with stream_of() as stream:
        await stream.send(request.replace(b"host: x", b"host: x\r\nconnection: close"))
        assert (await all_of(stream)).startswith(b"HTTP/1.1 200 ")
    assert caplog.records == []


async def test_slow_body_is_a_bad_request() -> None:
    async with stream_of(body_s=0.2) as stream:
        await stream.send(request_of(b"{", length=100))
        got = await received(stream)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert b"gateway.body_s = 0.2" in got


async def test_connections_beyond_the_limit_are_closed() -> None:
    async with client_of(FakeSession(PATH, KEY), max_connections=2) as client:
        async with (
            await anyio.connect_tcp(*address_of(client)),
            await anyio.connect_tcp(*address_of(client)),
            await anyio.connect_tcp(*address_of(client)) as third,
        ):
            assert await all_of(third) == b""


async def test_client_that_takes_nothing_is_left() -> None:
    session = FakeSession(PATH, KEY)
    session.script.append(answer(text="x" * 8_000_000))
    async with client_of(session, write_s=0.3) as client:
        async with await anyio.connect_tcp(*address_of(client)) as stream:
            await stream.send(request_of(json.dumps(ASKED).encode()))
            await until(lambda: bool(session.left_ids))
    assert session.left_ids == ["completion-1"]


@pytest.mark.parametrize("body", [ASKED, STREAMED], ids=["whole", "streamed"])
async def test_client_that_leaves_cancels_its_generation(body: dict[str, Any]) -> None:
    session = FakeSession(PATH, KEY)
    session.hold = anyio.Event()
    async with client_of(session) as client:
        async with await anyio.connect_tcp(*address_of(client)) as stream:
            await stream.send(request_of(json.dumps(body).encode()))
            await until(lambda: bool(session.calls))
        await until(lambda: session.cancelled == 1)
        session.hold.set()
        assert (await client.post(CHAT, json=body, headers=KEYED)).status_code == 200
    assert session.sampled == 1


async def test_client_that_only_ends_its_side_has_left() -> None:
    session = FakeSession(PATH, KEY)
    session.hold = anyio.Event()
    async with client_of(session) as client:
        async with await anyio.connect_tcp(*address_of(client)) as stream:
            await stream.send(request_of(json.dumps(ASKED).encode()))
            await until(lambda: bool(session.calls))
            await stream.send_eof()
            await until(lambda: session.cancelled == 1)


async def test_closing_cuts_connections_and_cancels_what_is_answered() -> None:
    session = FakeSession(PATH, KEY)
    session.hold = anyio.Event()
    with anyio.fail_after(10):
        async with served(session) as url:
            address = httpx.URL(url).host, httpx.URL(url).port or 0
            streams = [await anyio.connect_tcp(*address) for _ in range(2)]
            for stream in streams:
                await stream.send(request_of(json.dumps(ASKED).encode()))
            await until(lambda: len(session.calls) == 2)
        assert session.cancelled == 2
        for stream in streams:
            async with stream:
                assert await all_of(stream) == b""


def cut_reply(address: tuple[str, int], request: bytes, count: int) -> bytes:
    """Send a request, take `count` bytes of the reply, and close."""
    with socket.create_connection(address) as sock:
        sock.sendall(request)
        got = b""
        while len(got) < count:
            more = sock.recv(count - len(got))
            assert more
            got += more
        return got


async def whole_reply(address: tuple[str, int], request: bytes) -> bytes:
    async with await anyio.connect_tcp(*address) as stream:
        await stream.send(request)
        return await received(stream)


async def received(stream: anyio.abc.ByteReceiveStream) -> bytes:
    got = b""
    while not is_whole(got):
        got += await stream.receive()
    return got


def is_whole(reply: bytes) -> bool:
    head, _, body = reply.partition(b"\r\n\r\n")
    lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length: ")]
    return bool(lengths) and len(body) == int(lengths[0].split()[1])


#: Positions at which the reply is cut: every one, or a share.
CUTS = [
    (CHAT, 61),
    (MESSAGES, 101),
    (RESPONSES, 211),
    pytest.param(CHAT, 1, marks=pytest.mark.slow),
    pytest.param(MESSAGES, 1, marks=pytest.mark.slow),
    pytest.param(RESPONSES, 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("path", "step"), CUTS)
async def test_retry_after_a_cut_replays_and_samples_nothing(path: str, step: int) -> None:
    session = FakeSession(PATH, KEY)
    said = {"model": "rollout", "stream": True, "input": "2 + 2?"} | STREAMED
    async with client_of(session) as client:
        address = address_of(client)
        unmarked = request_of(json.dumps(said | {"user": "9999"}).encode(), path)
        length = len(await whole_reply(address, unmarked))
        for count in range(1, length, step):
            body = json.dumps(said | {"user": f"{count:04}"}).encode()
            request, before = request_of(body, path), session.sampled
            first = await anyio.to_thread.run_sync(cut_reply, address, request, count)
            again = await whole_reply(address, request)
            assert session.sampled == before + 1, count
            assert without_time(again).startswith(without_time(first)), count
        await whole_reply(address, unmarked)
        assert session.sampled == before + 2  # the first answer to it had been read


def without_time(reply: bytes) -> bytes:
    """A reply without the second in which it was written."""
    return CREATED.sub(b"now", reply)
