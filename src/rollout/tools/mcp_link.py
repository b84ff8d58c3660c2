"""A connection to an MCP server, which a task of its own makes again when the server ends."""

from __future__ import annotations

import logging
import math
import tempfile
from collections import deque
from typing import TYPE_CHECKING, Any, TextIO, cast

import anyio

from rollout.errors import ToolError
from rollout.scopes import leaf_of
from rollout.tools.mcp_sdk import EndingStream, OpenStreams, all_tools

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anyio.abc import TaskStatus

    from rollout.tools.mcp_sdk import McpSdk, NewTransport

logger = logging.getLogger("rollout.tools")

#: Seconds before a server that ended is started again; doubled at each failure in a row, up to …
RESTART_BACKOFF_S = 0.5
MAX_RESTART_BACKOFF_S = 30.0
#: Lines of a command's standard error that an error text quotes.
KEPT_LINES = 10


class McpLink:
    """One connection, kept up by a task of its own.

    Attributes:
        tools: What the server offered when it was last connected.
        users: Sessions of tools that are on it.
    """

    def __init__(
        self, label: str, sdk: McpSdk, new_transport: NewTransport, start_timeout_s: float
    ) -> None:
        self.tools: list[Any] = []
        self.users = 0
        self._label = label
        self._sdk = sdk
        self._new_transport = new_transport
        self._start_timeout_s = start_timeout_s
        self._client: Any = None
        self._up = anyio.Event()
        self._ended = anyio.Event()

    async def keep(self, *, task_status: TaskStatus[None]) -> None:
        """Connect, and connect again when the server ends.

        Raises:
            ToolError: The first connection failed; later failures are logged, and tried again.
        """
        fault = await self._serve(task_status)
        if fault:
            raise ToolError(f"MCP server {self._label!r}: {fault}")
        backoff_s = RESTART_BACKOFF_S
        while True:
            logger.warning("MCP server %r: %s; connecting again", self._label, fault or "it ended")
            await anyio.sleep(backoff_s)
            fault = await self._serve(anyio.TASK_STATUS_IGNORED)
            backoff_s = min(2 * backoff_s, MAX_RESTART_BACKOFF_S) if fault else RESTART_BACKOFF_S

    async def _serve(self, task_status: TaskStatus[None]) -> str:
        """One connection from its start to its end; why it did not come up, if so."""
        ended = anyio.Event()
        # The deadline is lifted once the server has answered: a scope around the start alone could
        # not be left before those that the client opens within it.
        start = anyio.CancelScope(deadline=anyio.current_time() + self._start_timeout_s)
        was_up, fault = False, "it ended while starting"
        with tempfile.TemporaryFile("w+", errors="replace") as file:
            errors = cast("TextIO", file)
            try:
                with start:
                    async with self._new_transport(errors) as (reader, writer):
                        streams = OpenStreams(EndingStream(reader, ended), writer)
                        async with self._sdk.new_client(streams) as client:
                            self.tools = await all_tools(client)
                            start.deadline, was_up = math.inf, True
                            self._go_up(client, ended)
                            task_status.started()
                            await ended.wait()
            except Exception as error:
                leaf = leaf_of(error) if isinstance(error, BaseExceptionGroup) else error
                fault = f"{type(leaf).__name__}: {leaf}"
            finally:
                self._go_down(ended)
            if was_up:
                return ""
            if start.cancelled_caught:
                fault = f"no answer within start_timeout_s = {self._start_timeout_s:g} s"
            return fault + _last_words(errors)

    def _go_up(self, client: Any, ended: anyio.Event) -> None:
        self._client, self._ended = client, ended
        self._up.set()

    def _go_down(self, ended: anyio.Event) -> None:
        """The connection that this event belongs to is of no more use."""
        ended.set()
        if ended is self._ended and self._client is not None:
            self._client, self._up = None, anyio.Event()

    async def call(self, name: str, arguments: Mapping[str, Any], *, may_repeat: bool) -> Any:
        """The server's answer; waits for a connection that is being made again.

        Raises:
            ToolError: The server refused the call; or it ended with the call under way, and a
                repeat might do harm.
        """
        while True:
            await self._up.wait()
            client, ended = self._client, self._ended
            try:
                return await client.call_tool(name, dict(arguments))
            except self._sdk.error as error:
                if error.code != self._sdk.connection_closed:
                    raise ToolError(error.message) from None
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                pass
            self._go_down(ended)
            if not may_repeat:
                raise ToolError(
                    "the MCP server ended during this call, and is being started again; whether "
                    "the call took effect is unknown"
                )


def _last_words(errors: TextIO) -> str:
    """The end of what a command wrote to its standard error."""
    errors.seek(0)
    lines = deque(errors, maxlen=KEPT_LINES)
    return "".join(f"\n    {line.rstrip()}" for line in lines)
