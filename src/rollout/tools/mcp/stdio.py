"""A command's standard input and output as a transport of MCP, of which no line is read too far.

The SDK's own reader has no bound, and takes time that grows with the square of a line's length.
"""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from rollout.tools.mcp.sdk import too_long

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from anyio.abc import Process
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from rollout.tools.mcp.sdk import McpSdk

#: From closing a server's standard input to asking it to end, and from there to killing it.
LEAVE_S, END_S = 2.0, 1.0
#: What reading and writing raise once the other side is gone, or ours is closed.
_GONE = (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError)
#: Bytes of each end of a line that is too long, in one of which its id stands.
_ENDS = 4096
#: The id of a message: some servers write it first, others last.
_ID = re.compile(
    rb'\A\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+|"[^"\\]*")\s*,'
    rb'|"id"\s*:\s*(\d+|"[^"\\]*")\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z'
)


@attrs.frozen
class LongLine:
    """A line that was not kept: its size in bytes, and its two ends."""

    size: int
    ends: bytes

    @property
    def request_id(self) -> int | str | None:
        """The request that it answers; None where that is not known."""
        found = _ID.search(self.ends)
        return None if found is None else json.loads(found[1] or found[2])


class LineReader:
    """Bytes to lines; of one that has more than `most`, only the ends are kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._line = bytearray()
        self._size = 0
        self._tail = b""

    def lines(self, piece: bytes) -> Iterator[bytes | LongLine]:
        """The lines that end in `piece`, which follows those before."""
        *ended, rest = piece.split(b"\n")
        for end in ended:
            self._add(end)
            yield self._finished()
        self._add(rest)

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= self._most:
            self._line += piece
        else:
            self._line = self._line[:_ENDS] + piece[: max(0, _ENDS - len(self._line))]
            self._tail = (self._tail + piece)[-_ENDS:]

    def _finished(self) -> bytes | LongLine:
        size, line = self._size, bytes(self._line)
        if size > self._most:
            kept: bytes | LongLine = LongLine(size, line + self._tail)
        else:
            kept = line
        self._line, self._size, self._tail = bytearray(), 0, b""
        return kept


@asynccontextmanager
async def open_stdio(
    sdk: McpSdk,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: str | None,
    errors: Any,
    max_bytes: int,
    is_frozen: Callable[[], bool],
) -> AsyncIterator[tuple[Any, Any]]:
    """The streams to and from a server that runs in a process of its own.

    Args:
        sdk: Makes messages of lines.
        command: With its arguments.
        env, cwd: See `connect_mcp`.
        errors: The file for its standard error.
        max_bytes: Longest message that is read; an error takes the place of a longer answer.
        is_frozen: Whether the server is to be killed, when the block ends, rather than asked to.
    """
    process = await anyio.open_process(
        list(command),
        env={**sdk.safe_environment(), **(env or {})},
        stderr=errors,
        cwd=cwd,
        start_new_session=True,
    )
    heard, to_client = anyio.create_memory_object_stream[Any](0)
    from_client, said = anyio.create_memory_object_stream[Any](0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, sdk, process, heard, max_bytes)
        tasks.start_soon(_write, process, said, heard)
        try:
            yield to_client, from_client
        finally:
            with anyio.CancelScope(shield=True):
                from_client.close()
                await _end(process, is_frozen=is_frozen())
                to_client.close()
            tasks.cancel_scope.cancel()


async def _read(
    sdk: McpSdk, process: Process, heard: MemoryObjectSendStream[Any], max_bytes: int
) -> None:
    """Hand the server's messages on; once they are not taken, keep reading, lest it block."""
    assert process.stdout is not None
    reader, is_wanted = LineReader(max_bytes), True
    with heard, suppress(*_GONE):
        while True:
            piece = await process.stdout.receive()
            messages = (_message(sdk, line, max_bytes) for line in reader.lines(piece))
            for message in messages if is_wanted else ():
                try:
                    if message is not None:
                        await heard.send(message)
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    is_wanted = False
                    break


def _message(sdk: McpSdk, line: bytes | LongLine, max_bytes: int) -> Any:
    """What a line says to the SDK; None where that is nothing."""
    if isinstance(line, LongLine):
        request_id = line.request_id
        if request_id is None:
            return None
        return sdk.refusal(request_id, too_long(max_bytes, f" ({line.size:,})"))
    return sdk.message(line) if line.strip() else None


async def _write(
    process: Process, said: MemoryObjectReceiveStream[Any], heard: MemoryObjectSendStream[Any]
) -> None:
    assert process.stdin is not None
    try:
        async with said:
            async for message in said:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.stdin.send(text.encode() + b"\n")
    except _GONE:
        heard.close()  # the client must not wait for answers


async def _end(process: Process, *, is_frozen: bool) -> None:
    """End the server and what it has started; bounded."""
    assert process.stdin is not None
    if not is_frozen:
        with suppress(*_GONE):
            await process.stdin.aclose()
        if not await _has_ended(process, LEAVE_S):
            _signal(process, signal.SIGTERM)
            await _has_ended(process, END_S)
    _signal(process, signal.SIGKILL)
    await _has_ended(process, END_S)
    with anyio.move_on_after(END_S):
        await process.aclose()


async def _has_ended(process: Process, seconds: float) -> bool:
    """Whether it ends in time."""
    with anyio.move_on_after(seconds):
        await process.wait()
    return process.returncode is not None


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
