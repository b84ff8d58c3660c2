"""A connection to an MCP server, which a task of its own makes again when the server ends."""

from __future__ import annotations

import logging
import math
import tempfile
from typing import TYPE_CHECKING, Any, TextIO, cast

import anyio
import attrs

from rollout.errors import ToolError
from rollout.scopes import unwrap_group
from rollout.tools.mcp.liveness import Liveness
from rollout.tools.mcp.sdk import HeardStream, OpenStreams, all_tools

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anyio.abc import TaskStatus

    from rollout.tools.mcp.sdk import McpSdk
    from rollout.tools.mcp.transports import NewTransport

logger = logging.getLogger("rollout.tools")

#: Seconds before a server that ended is restarted; doubled at each failure in a row, up to …
RESTART_BACKOFF_S = 0.5
MAX_RESTART_BACKOFF_S = 30.0
#: Seconds for leaving a server in good order, beyond which the connection is cut.
LEAVE_S = 4.0
#: Lines of a command's standard error that an error text quotes, and bytes that are looked at.
KEPT_LINES, KEPT_BYTES = 10, 16_384


@attrs.define(eq=False)
class _Connection:
    """One connection from its start to its end.

    Attributes:
        ended: It is of no more use.
        how: What became of the server.
        client: The SDK's; None until the server has answered.
    """

    liveness: Liveness
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    how: str = "ended"
    is_frozen: bool = False
    client: Any = None


class McpLink:
    """A connection, kept up by a task of its own.

    Args:
        label: Names the server.
        sdk: The SDK.
        new_transport: Opens a transport for each connection.
        start_timeout_s: From starting a connection to its list of tools.
        ping_s: See `Liveness`.
        max_bytes: Longest answer that is read.

    Attributes:
        tools: What the server offered when it was last connected.
        users: Sessions of tools that are on it.
    """

    def __init__(
        self,
        label: str,
        sdk: McpSdk,
        new_transport: NewTransport,
        *,
        start_timeout_s: float,
        ping_s: float,
        max_bytes: int,
    ) -> None:
        self.tools: list[Any] = []
        self.users = 0
        self._label = label
        self._sdk = sdk
        self._new_transport = new_transport
        self._start_timeout_s = start_timeout_s
        self._ping_s = ping_s
        self._max_bytes = max_bytes
        self._current: _Connection | None = None
        self._start: anyio.CancelScope | None = None
        self._fault = ""
        self._tried = anyio.Event()
        self._leaving = anyio.Event()
        self._left = anyio.Event()

    async def keep(self, *, task_status: TaskStatus[None]) -> None:
        """Connect, and connect again when the server ends, until `leave`.

        Raises:
            ToolError: The first connection failed; later failures are logged, and tried again.
        """
        try:
            await self._keep(task_status)
        finally:
            self._left.set()

    async def _keep(self, task_status: TaskStatus[None]) -> None:
        how = await self._serve(task_status)
        if self._fault:
            raise ToolError(f"MCP server {self._label!r}: {self._fault}")
        backoff_s = RESTART_BACKOFF_S
        while not self._leaving.is_set():
            logger.warning("MCP server %r: %s; connecting again", self._label, self._fault or how)
            with anyio.move_on_after(backoff_s):
                await self._leaving.wait()
                return
            how = await self._serve(anyio.TASK_STATUS_IGNORED)
            backoff_s = min(2 * backoff_s, MAX_RESTART_BACKOFF_S)
            backoff_s = backoff_s if self._fault else RESTART_BACKOFF_S

    async def leave(self) -> None:
        """End the connection and the task that keeps it; returns when both have ended."""
        self._leaving.set()
        if self._current is not None:
            self._current.ended.set()
        elif self._start is not None:
            self._start.cancel()
        await self._left.wait()

    async def _serve(self, task_status: TaskStatus[None]) -> str:
        """One connection from its start to its end; how it ended, or else the fault is set."""
        connection = _Connection(Liveness(self._ping_s))
        # The deadline is lifted once the server has answered: a scope around the start alone could
        # not be left before those that the client opens within it.
        scope = anyio.CancelScope(deadline=anyio.current_time() + self._start_timeout_s)
        self._start = scope
        fault = "it ended while starting"
        with tempfile.TemporaryFile("w+", errors="replace") as file:
            errors = cast("TextIO", file)
            try:
                with scope:
                    await self._converse(connection, errors, scope, task_status)
            except Exception as error:
                leaf = unwrap_group(error) if isinstance(error, BaseExceptionGroup) else error
                fault = f"{type(leaf).__name__}: {leaf}"
            finally:
                self._lose(connection)
            if connection.client is not None:
                return connection.how
            if scope.cancelled_caught:
                fault = f"no answer within start_timeout_s = {self._start_timeout_s:g} s"
            self._fault = fault + _last_output(errors)
            self._tried.set()
            return ""

    async def _converse(
        self,
        connection: _Connection,
        errors: TextIO,
        scope: anyio.CancelScope,
        task_status: TaskStatus[None],
    ) -> None:
        """Connect, and return once the connection is of no more use."""
        liveness, ended = connection.liveness, connection.ended
        async with self._new_transport(errors, lambda: connection.is_frozen) as (reader, writer):
            streams = OpenStreams(HeardStream(reader, liveness.hear, ended.set), writer)
            async with self._sdk.new_client(streams) as client:
                self.tools = await all_tools(client)
                scope.deadline = math.inf
                connection.client = client
                self._current, self._fault = connection, ""
                self._tried.set()
                task_status.started()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch, connection)
                    await ended.wait()
                    tasks.cancel_scope.cancel()
                # A server that is frozen may block what is sent to it at the end.
                scope.deadline = anyio.current_time() + LEAVE_S

    async def _watch(self, connection: _Connection) -> None:
        """Give the connection up once its server is frozen."""

        async def ping() -> None:
            try:
                await connection.client.session.send_ping()
            except self._sdk.error:  # an answer as well: newer servers know no ping
                return

        await connection.liveness.stop(ping)
        connection.is_frozen = True
        connection.how = f"was silent for {self._ping_s:g} s, even to a ping"
        connection.ended.set()

    def _lose(self, connection: _Connection) -> None:
        """The connection is of no more use."""
        connection.ended.set()
        if self._current is connection:
            self._current, self._tried = None, anyio.Event()

    async def _connection(self) -> _Connection:
        """The connection, or the one that is being made again for the first time.

        Raises:
            ToolError: It could not be made again; attempts continue.
        """
        while self._current is None:
            if self._fault:
                raise ToolError(
                    f"the MCP server is not there ({self._fault}), and is being started again; "
                    "not called"
                )
            await self._tried.wait()
        return self._current

    async def call(self, name: str, arguments: Mapping[str, Any], *, may_repeat: bool) -> Any:
        """The server's answer; waits for a connection that is being made again.

        Raises:
            ToolError: The server refused the call, or cannot be reached again; or it ended or
                froze with the call under way, and a repeat might do harm.
        """
        while True:
            connection = await self._connection()
            try:
                with connection.liveness.asking():
                    return await connection.client.call_tool(name, dict(arguments))
            except self._sdk.error as error:
                if not self._sdk.is_connection_lost(error):
                    raise ToolError(self._sdk.text_of(error, self._max_bytes)) from None
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                pass
            self._lose(connection)
            if not may_repeat:
                raise ToolError(
                    f"the MCP server {connection.how} during this call, and is being started "
                    "again; whether the call took effect is unknown"
                )


def _last_output(errors: TextIO) -> str:
    """The end of what a command wrote to its standard error."""
    end = errors.seek(0, 2)
    errors.seek(max(0, end - KEPT_BYTES))
    return "".join(f"\n    {line.rstrip()}" for line in errors.read().splitlines()[-KEPT_LINES:])
