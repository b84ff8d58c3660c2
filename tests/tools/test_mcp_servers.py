"""MCP servers that freeze, that say too much, and that each trajectory has for itself."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import psutil
import pytest
from anyio.abc import ByteReceiveStream, Process
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout
from rollout import Outcome, Prompt
from rollout.config import LimitsConfig, SchedulingConfig
from rollout.errors import ToolError
from rollout.testing import Scenario
from rollout.testing import tool_call as said_call
from rollout.tools import Tool, ToolContext, ToolResult, connect_mcp
from rollout.tools.mcp_transports import bound_bodies, read_lines
from rollout.types import ToolCall

pytestmark = pytest.mark.process
SERVER = [sys.executable, str(Path(__file__).with_name("mcp_test_server.py"))]
both_backends = pytest.mark.parametrize(
    "anyio_backend", ["trio", pytest.param("asyncio", marks=pytest.mark.slow)]
)
UNKNOWN = "during this call, and is being started again; whether the call took effect is unknown"


@pytest.fixture
def anyio_backend() -> str:
    """Real time: servers are processes."""
    return "trio"


@pytest.fixture
def context(threads: Any) -> ToolContext:
    return ToolContext(uid="p", member=0, threads=threads)


async def ask(tools: list[Tool], context: ToolContext, name: str, **arguments: Any) -> str:
    """The answer to one call, in a session of its own."""
    tool = next(tool for tool in tools if tool.name == name)
    session = await tool.open(context)
    try:
        result = await session.execute(ToolCall(name=name, arguments=arguments))
    finally:
        await session.close()
    assert isinstance(result, ToolResult)
    return result.text


def servers() -> list[psutil.Process]:
    return psutil.Process().children()


@asynccontextmanager
async def over_http() -> AsyncIterator[tuple[str, Process]]:
    """The server over HTTP, and its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nothing = subprocess.DEVNULL
    command = [*SERVER, str(port)]
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
            process.kill()


# Servers that freeze


@pytest.mark.anyio
@both_backends
async def test_frozen_server_is_started_again_and_its_calls_fail(context: ToolContext) -> None:
    async with connect_mcp(SERVER, ping_s=1) as tools:
        (frozen,) = servers()
        frozen.suspend()
        failures: list[str] = []

        async def count() -> None:
            with pytest.raises(ToolError) as failure:
                await ask(tools, context, "count")
            failures.append(str(failure.value))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(count)
            assert failures == [f"the MCP server was silent for 1 s, even to a ping {UNKNOWN}"] * 8
            assert await ask(tools, context, "count") == "1"
        assert not frozen.is_running()
    assert servers() == []


@pytest.mark.slow
@pytest.mark.anyio
async def test_frozen_server_is_found_after_a_call_was_given_up(context: ToolContext) -> None:
    async with connect_mcp(SERVER, ping_s=3) as tools:
        (frozen,) = servers()
        frozen.suspend()
        with anyio.move_on_after(0.1):
            await ask(tools, context, "count")
        with anyio.fail_after(60):
            answered = await ask(tools, context, "process")
        assert answered == str(servers()[0].pid) != str(frozen.pid)


@pytest.mark.anyio
async def test_server_that_works_for_long_is_left_alone(context: ToolContext) -> None:
    async with connect_mcp(SERVER, ping_s=1) as tools:
        (server,) = servers()
        assert await ask(tools, context, "nap", seconds=2.5) == "awake"
        with anyio.move_on_after(0.05):
            await ask(tools, context, "nap", seconds=60)
        assert await ask(tools, context, "nap", seconds=0.8) == "awake"
        assert await ask(tools, context, "process") == str(server.pid)


@pytest.mark.slow
@pytest.mark.anyio
async def test_frozen_http_server_fails_calls_at_once_until_it_is_back(
    context: ToolContext,
) -> None:
    async with over_http() as (url, process):
        async with connect_mcp(url, ping_s=1, start_timeout_s=5.0) as tools:
            assert await ask(tools, context, "count") == "1"
            process.send_signal(signal.SIGSTOP)
            with anyio.fail_after(60):
                with pytest.raises(ToolError, match="even to a ping"):
                    await ask(tools, context, "count")
                for _ in range(100):
                    with pytest.raises(ToolError) as failure:
                        await ask(tools, context, "count")
                assert str(failure.value) == (
                    "the MCP server is not there (no answer within start_timeout_s = 5 s), and is "
                    "being started again; not called"
                )
                process.send_signal(signal.SIGCONT)
                while True:
                    try:
                        await ask(tools, context, "count")
                        break
                    except ToolError:
                        await anyio.sleep(0.1)


@pytest.mark.anyio
async def test_trajectories_on_a_frozen_server_go_on_without_their_full_limit() -> None:
    scenario = Scenario(seed=1).reply("count", said_call("count")).then("Done.")
    config = scenario.config(
        limits=LimitsConfig(tool_s=60), scheduling=SchedulingConfig(samples_per_prompt=4)
    )
    async with (
        connect_mcp(SERVER, ping_s=1) as tools,
        rollout.open_rollout(config, tools=tools) as runtime,
    ):
        servers()[0].suspend()
        prompts = [Prompt(messages=[{"role": "user", "content": "count"}])]
        with anyio.fail_after(60):
            first = await runtime.generate(prompts)
            second = await runtime.generate(prompts)
    assert {row.outcome for row in (*first.samples, *second.samples)} == {Outcome.COMPLETED}
    assert [row.metrics["tool_errors"] for row in first.samples] == [1] * 4
    assert [row.metrics["tool_errors"] for row in second.samples] == [0] * 4


# Answers without bound


@pytest.mark.anyio
@both_backends
async def test_answer_of_20_megabytes_is_not_read_and_others_arrive(context: ToolContext) -> None:
    async with connect_mcp(SERVER) as tools:
        (server,) = servers()
        others: list[str] = []

        async def nap() -> None:
            others.append(await ask(tools, context, "nap", seconds=0.2))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(nap)
            with pytest.raises(ToolError) as failure:
                await ask(tools, context, "much", count=20_000_000)
        assert str(failure.value) == (
            "the MCP server's answer has more than 1,048,576 bytes, and was not read (connect_mcp: "
            "max_answer_bytes)"
        )
        assert others == ["awake"]
        assert len(await ask(tools, context, "much", count=400_000)) == 400_000
        assert await ask(tools, context, "process") == str(server.pid)


@pytest.mark.anyio
async def test_answer_of_20_megabytes_over_http_is_not_read(context: ToolContext) -> None:
    async with over_http() as (url, _), connect_mcp(url, max_answer_bytes=100_000) as tools:
        assert len(await ask(tools, context, "much", count=20_000)) == 20_000
        with pytest.raises(ToolError) as failure:
            await ask(tools, context, "much", count=20_000_000)
        assert str(failure.value) == (
            "the MCP server's answer has more than 100,000 bytes, and was not read (connect_mcp: "
            "max_answer_bytes)"
        )
        assert await ask(tools, context, "count") == "1"


@pytest.mark.anyio
@both_backends
async def test_http_body_that_is_compressed_all_the_same_is_refused() -> None:
    async def packed() -> AsyncIterator[bytes]:
        yield b"\x1f\x8b"

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.headers["x"] == "y"
        return httpx2.Response(200, headers={"content-encoding": "gzip"}, content=packed())

    async with httpx2.AsyncClient(
        transport=httpx2.MockTransport(answer),
        event_hooks={"response": [bound_bodies(10)]},
    ) as client:
        response = await client.post("http://host/", json={"id": 7}, headers={"x": "y"})
    assert response.json()["id"] == 7
    assert response.json()["error"]["message"] == (
        "the MCP server compressed its answer, which it was asked not to do"
    )


LINES = st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=6)


class Pieces(ByteReceiveStream):
    """A byte stream of these pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self.pieces:
            raise anyio.EndOfStream
        return self.pieces.pop(0)

    async def aclose(self) -> None:
        pass


def read_all(pieces: list[bytes], most: int) -> list[bytes]:
    async def read() -> list[bytes]:
        return [line async for line in read_lines(Pieces(pieces), most)]

    return anyio.run(read, backend="asyncio")


@given(lines=LINES, sizes=st.lists(st.integers(1, 9)), most=st.integers(1, 30))
@settings(max_examples=30)
def test_lines_that_are_not_too_long_are_read(
    lines: list[bytes], sizes: list[int], most: int
) -> None:
    text = b"".join(line + b"\n" for line in lines)
    ends = list(itertools.accumulate([0, *sizes]))
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)] + [text[ends[-1] :]]
    found = read_all([piece for piece in pieces if piece], most)
    assert found == [line for line in lines if len(line) <= most and line.strip()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"jsonrpc":"2.0","id":12,"result":{"x":"%s"}}', 12),
        (b'{"jsonrpc": "2.0", "id": "a-1", "result": {"id": 3, "x": "%s"}}', "a-1"),
        (b'{"result":{"id":5,"x":"%s"},"jsonrpc":"2.0","id":7}', 7),
        (b'{"result":{"x":"%s"},"id":7,"jsonrpc":"2.0"}', 7),
        (b'{"jsonrpc":"2.0","method":"log","params":{"x":"%s","id":5}}', None),
    ],
)
@pytest.mark.parametrize("size", [1500, 5_000_000])
def test_long_answer_is_refused_to_its_request(line: bytes, expected: Any, size: int) -> None:
    text = line % (b"x" * size) + b"\nlast\n"
    pieces = [text[at : at + 65_536] for at in range(0, len(text), 65_536)]
    *found, last = read_all(pieces, 1000)
    answers = [json.loads(each) for each in found]
    assert last == b"last"
    assert [each["id"] for each in answers] == ([] if expected is None else [expected])
    assert all("has more than 1,000 bytes" in each["error"]["message"] for each in answers)


# A server for each trajectory


@pytest.mark.anyio
async def test_server_of_a_trajectory_keeps_its_state_to_it(threads: Any) -> None:
    contexts = [ToolContext(uid="p", member=member, threads=threads) for member in range(2)]
    async with connect_mcp(SERVER, per_trajectory=True) as tools:
        assert servers() == []
        by_name = {tool.name: tool for tool in tools}
        sessions = [
            (await by_name["count"].open(context), await by_name["process"].open(context))
            for context in contexts
        ]
        assert len(servers()) == 2
        call = ToolCall(name="count", arguments={})
        for count, _ in sessions:
            assert [(await count.execute(call)).text for _ in range(2)] == ["1", "2"]
        pids = [
            (await process.execute(ToolCall(name="process", arguments={}))).text
            for _, process in sessions
        ]
        assert sorted(pids) == sorted(str(server.pid) for server in servers())
        for count, process in sessions:
            await count.close()
            assert len(servers()) == 2 - sessions.index((count, process))
            await process.close()
            assert len(servers()) == 1 - sessions.index((count, process))


@pytest.mark.anyio
async def test_trajectories_have_a_server_each_and_leave_none() -> None:
    calls = f"{said_call('count')}\n{said_call('count')}"
    scenario = Scenario(seed=1).reply("count", calls).then("Done.")
    config = scenario.config(scheduling=SchedulingConfig(samples_per_prompt=3))
    provider = connect_mcp(SERVER, per_trajectory=True)
    async with rollout.open_rollout(config, tools=[provider]) as runtime:
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": "count"}])])
        assert servers() == []
    for trajectory in batch.trajectories:
        answers = [m.content for m in trajectory.messages if m.role == "tool"]
        assert sorted(answers, key=str) == ["1", "2"]


@pytest.mark.anyio
async def test_trajectory_that_is_cancelled_leaves_no_server_of_its_own() -> None:
    scenario = Scenario(seed=1).reply("nap", said_call("nap", seconds=60)).then("Done.")
    config = scenario.config(limits=LimitsConfig(cleanup_s=60))
    provider = connect_mcp(SERVER, per_trajectory=True)
    async with rollout.open_rollout(config, tools=[provider]) as runtime:
        with anyio.fail_after(60):  # on a busy machine a server takes long to start
            async with anyio.create_task_group() as tasks:

                async def cancel() -> None:
                    while not servers():
                        await anyio.sleep(0.02)
                    runtime.cancel(reason="enough")

                tasks.start_soon(cancel)
                batch = await runtime.generate(
                    [Prompt(messages=[{"role": "user", "content": "nap"}])]
                )
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
    scenario = Scenario(seed=1).reply("count", said_call("count")).then("Done.")
    provider = connect_mcp([sys.executable, "-c", program], per_trajectory=True)
    async with rollout.open_rollout(scenario.config(), tools=[provider]) as runtime:
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": "count"}])])
    answer = next(m.content for m in batch.trajectories[0].messages if m.role == "tool")
    assert answer is not None
    assert answer.startswith("could not open 'count': MCP server ")
    assert answer.endswith("no more")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            {"per_trajectory": True, "connections": 2},
            "connections = 2: expected 1 with per_trajectory = True",
        ),
        ({"ping_s": 0}, "ping_s = 0: expected a number > 0 or None"),
        ({"max_answer_bytes": 0}, "max_answer_bytes = 0: expected at least 1"),
    ],
)
async def test_wrong_arguments_are_refused_before_a_server_starts(options: Any, fault: str) -> None:
    with pytest.raises(ToolError, match=f"^connect_mcp: {fault}$"):
        async with connect_mcp(SERVER, **options):
            pytest.fail("connected")


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    yield
    for process in servers():
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
