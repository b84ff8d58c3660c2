"""An MCP server for tests, over standard input and output or, with a port and a form, over HTTP."""

from __future__ import annotations

import os
import sys

import anyio
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("test")
counts: list[int] = []


@server.tool()
def much(count: int) -> str:
    """Say so many letters."""
    return "x" * count


@server.tool()
async def nap(seconds: float) -> str:
    """Answer after a while."""
    await anyio.sleep(seconds)
    return "awake"


@server.tool()
def count() -> str:
    """Count the calls."""
    counts.append(1)
    return str(len(counts))


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def process() -> str:
    """Tell the process."""
    return str(os.getpid())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        port, is_json = int(sys.argv[1]), sys.argv[2] == "json"
        server.run("streamable-http", host="127.0.0.1", port=port, json_response=is_json)
    else:
        server.run("stdio")
