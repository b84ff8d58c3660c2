"""How the messages of a MCP server travel: over HTTP, or the standard streams of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.tools.mcp.stdio import open_stdio

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import Any, TextIO

    from rollout.tools.mcp.sdk import McpSdk

    NewTransport = Callable[[TextIO, Callable[[], bool]], AbstractAsyncContextManager[Any]]


def transport(
    sdk: McpSdk,
    server: str | Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: str | None,
    headers: Mapping[str, str] | None,
    max_bytes: int,
) -> NewTransport:
    """Makes a transport for each connection."""
    if isinstance(server, str):
        asked = {"Accept-Encoding": "identity", **(headers or {})}
        return lambda *_: sdk.http_streams(server, asked, max_bytes)
    return lambda errors, is_frozen: open_stdio(
        sdk,
        server,
        env=env,
        cwd=cwd,
        errors=errors,
        max_bytes=max_bytes,
        is_frozen=is_frozen,
    )
