"""An MCP server for tests: over standard input and output, or with a port and a form over HTTP.

Over standard input it speaks JSON-RPC by itself, as importing the SDK takes a second; over HTTP it
is the SDK's own server.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

counts: list[int] = []


def much(count: int) -> str:
    """Say so many letters."""
    return "x" * count


def nap(seconds: float) -> str:
    """Answer after a while."""
    threading.Event().wait(seconds)
    return "awake"


def count() -> str:
    """Count the calls."""
    counts.append(1)
    return str(len(counts))


def process() -> str:
    """Tell the process."""
    return str(os.getpid())


class NoSuchRow(Exception):
    """The server's own error, with a code that the SDK has too: -32000."""


def look_up() -> str:
    """Find no row."""
    raise NoSuchRow


#: The tools, and their arguments with the types that JSON has for them.
TOOLS: dict[Any, dict[str, str]] = {
    much: {"count": "integer"},
    nap: {"seconds": "number"},
    count: {},
    process: {},
    look_up: {},
}


def describe(function: Any, arguments: dict[str, str]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in arguments.items()},
        "required": list(arguments),
    }
    name, text = function.__name__, function.__doc__
    return {"name": name, "description": text, "inputSchema": schema}


def answer(method: str, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a request; None where there is no such method."""
    if method == "initialize":
        return {
            "protocolVersion": asked["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "test", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [describe(*each) for each in TOOLS.items()]}
    if method == "tools/call":
        by_name = {each.__name__: each for each in TOOLS}
        text = by_name[asked["name"]](**asked.get("arguments") or {})
        return {"content": [{"type": "text", "text": text}], "isError": False}
    return {} if method == "ping" else None


def serve_lines() -> None:
    """Answer each line in a thread of its own."""
    writing = threading.Lock()

    def respond(request: dict[str, Any]) -> None:
        try:
            result = answer(request["method"], request.get("params") or {})
            error = {"code": -32601, "message": "no such method"}
        except NoSuchRow:
            result, error = None, {"code": -32000, "message": "no such row"}
        body = {"error": error} if result is None else {"result": result}
        with writing:
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], **body}) + "\n")
            sys.stdout.flush()

    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            threading.Thread(target=respond, args=(message,), daemon=True).start()
    os._exit(0)  # naps may go on


def serve_http(port: int, *, is_json: bool) -> None:
    from anyio import to_thread
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("test")
    for each in (much, count, process):
        server.tool()(each)

    @server.tool(name="nap")
    async def rest(seconds: float) -> str:
        """Answer after a while."""
        return await to_thread.run_sync(nap, seconds, abandon_on_cancel=True)

    server.run("streamable-http", host="127.0.0.1", port=port, json_response=is_json)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve_http(int(sys.argv[1]), is_json=sys.argv[2] == "json")
    else:
        serve_lines()
