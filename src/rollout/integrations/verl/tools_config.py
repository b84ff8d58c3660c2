"""Tool configurations of verl: YAML files that name classes, their settings and their schemas."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from anyio import AsyncContextManagerMixin

from rollout.errors import ToolError
from rollout.integrations.verl.tools import VerlSchema, VerlTool
from rollout.integrations.verl.yaml_files import class_of, entries_of, settings_of
from rollout.tools.mcp import connect_mcp
from rollout.tools.schemas import as_openai_schema

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from contextlib import AbstractAsyncContextManager

    from rollout.tools.tool import Tool


def load_verl_tools(yaml_path: str | Path) -> list[Tool | AbstractAsyncContextManager[list[Tool]]]:
    """The tools of a verl tool configuration, for `open_rollout`; their classes unchanged.

    Each entry of ``tools`` has ``class_name`` (``package.module.Class``), ``config`` (given to the
    class as it is) and ``tool_schema`` (kept whole; without one the class is asked). The working
    directory and that of the file become importable.

    An entry whose ``config`` has the type ``mcp`` has ``mcp`` with ``mcp_servers_config_path``, a
    JSON file whose ``mcpServers`` have a ``url`` or a ``command`` each, and optionally
    ``tool_selected_list``. Each server is a context manager, which `open_rollout` opens.

    Raises:
        ToolError: It lists the faults of all entries.
    """
    entries = entries_of(yaml_path, "tools", ToolError)
    tools: list[Tool | AbstractAsyncContextManager[list[Tool]]] = []
    faults = []
    for number, entry in enumerate(entries):
        try:
            if _is_mcp(entry):
                tools += [_Server(options) for options in _servers_of(entry)]
            else:
                tools.append(_tool_of(entry, f"{yaml_path}: tools[{number}]"))
        except ToolError as error:
            faults.append(f"tools[{number}]{error}")
    if faults:
        raise ToolError(f"{yaml_path}: {'; '.join(faults)}")
    return tools


class _Server(AsyncContextManagerMixin):
    """Those of a server's tools that are wanted; it need not have all of them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._wanted: Sequence[str] | None = options.pop("wanted")
        self._options = options

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[list[Tool]]:
        async with connect_mcp(**self._options) as tools:
            yield [tool for tool in tools if self._wanted is None or tool.name in self._wanted]


def _is_mcp(entry: Any) -> bool:
    config = entry.get("config") if isinstance(entry, dict) else None
    return isinstance(config, dict) and config.get("type") == "mcp"


def _servers_of(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Arguments of `_Server`; an error's text continues the entry's path."""
    settings = entry.get("mcp")
    if not isinstance(settings, dict):
        raise ToolError(f".mcp = {settings!r:.80}: expected mcp_servers_config_path in it")
    path, wanted = settings.get("mcp_servers_config_path"), settings.get("tool_selected_list")
    field = f".mcp.mcp_servers_config_path = {path!r}"
    try:
        data = msgspec.json.decode(Path(str(path)).read_bytes())
    except OSError as error:
        raise ToolError(f"{field}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ToolError(f"{field}: no JSON: {error}") from None
    servers = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ToolError(f"{field}: mcpServers = {servers!r:.80}; expected servers by name")
    return [
        {**_server_options(server, f"{field}: mcpServers.{name}"), "wanted": wanted}
        for name, server in servers.items()
    ]


def _server_options(server: Any, where: str) -> dict[str, Any]:
    if isinstance(server, dict) and isinstance(server.get("command"), str):
        command = [server["command"], *map(str, server.get("args", ()))]
        return {"server": command, "env": server.get("env"), "cwd": server.get("cwd")}
    if isinstance(server, dict) and isinstance(server.get("url"), str):
        headers = dict(server.get("headers") or {})
        if server.get("auth_token"):
            headers["Authorization"] = f"Bearer {server['auth_token']}"
        return {"server": server["url"], "headers": headers}
    raise ToolError(f"{where} = {server!r:.80}: expected a url or a command")


def _tool_of(entry: Any, origin: str) -> Tool:
    """The tool of one entry; an error's text continues the entry's path."""
    if not isinstance(entry, dict):
        raise ToolError(f" = {entry!r:.80}: expected class_name, config and tool_schema")
    config = settings_of(entry, ToolError)
    kind = config.get("type", "native")
    if kind != "native":
        raise ToolError(f".config.type = {kind!r:.80}: expected 'native' or 'mcp'")
    cls = class_of(entry, ToolError)
    given = entry.get("tool_schema")
    schema = None if given is None else as_openai_schema(given, ".tool_schema")
    try:
        tool = cls(config=config, tool_schema=None if schema is None else VerlSchema(schema))
    except Exception as error:
        raise ToolError(f": {cls.__name__} raised {type(error).__name__}: {error}") from error
    try:
        return VerlTool(tool, schema=schema, origin=f"{origin} {cls.__name__}")
    except ToolError as error:
        raise ToolError(f": {error}") from None
