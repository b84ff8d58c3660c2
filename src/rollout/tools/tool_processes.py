"""Child processes for tools whose code must not share an interpreter with the event loop."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from rollout.errors import ToolError
from rollout.limits import cleanup_scope
from rollout.tools.policy import TransientError
from rollout.tools.results import ToolResult
from rollout.tools.tool_process_messages import LENGTH, FunctionRef, Reply, Request

if TYPE_CHECKING:
    from anyio.abc import Process


class _Child:
    """One process, and the frames to and from it."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._requests = process.stdin
        self._replies = BufferedByteReceiveStream(process.stdout)

    async def ask(self, request: bytes) -> Reply:
        """The reply to a request; after a cancellation the process is of no more use."""
        await self._requests.send(LENGTH.pack(len(request)) + request)
        (length,) = LENGTH.unpack(await self._replies.receive_exactly(LENGTH.size))
        return msgspec.msgpack.decode(await self._replies.receive_exactly(length), type=Reply)

    async def kill(self, cleanup_s: float) -> int | None:
        """End the process and all others of its group; its exit code."""
        with cleanup_scope(cleanup_s):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
            await self.process.aclose()
        return self.process.returncode


class ToolProcesses:
    """A pool of child processes, each running one call at a time and kept for the next one.

    Args:
        max_processes: Calls that run at once; further ones wait.
        cleanup_s: Seconds for the end of a process that was killed.
    """

    def __init__(self, *, max_processes: int, cleanup_s: float) -> None:
        self._places = anyio.CapacityLimiter(max_processes)
        self._cleanup_s = cleanup_s
        self._idle: list[_Child] = []

    async def run(self, name: str, function: FunctionRef, arguments: dict[str, Any]) -> ToolResult:
        """What the function returns; cancellation kills its process with the process's group.

        Raises:
            ToolError: It raised, or its process died.
            TransientError: It raised what its policy calls transient.
        """
        try:
            request = msgspec.msgpack.encode(Request(function, name, arguments))
        except Exception as error:  # from tools_kwargs, which may hold any object
            raise ToolError(f"{name}: its arguments are not plain data: {error}") from error
        borrower = object()
        await self._places.acquire_on_behalf_of(borrower)
        try:
            return _result(await self._reply(name, request))
        finally:
            self._places.release_on_behalf_of(borrower)

    async def _reply(self, name: str, request: bytes) -> Reply:
        child = self._idle.pop() if self._idle else await _start()
        try:
            reply = await child.ask(request)
        except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            code = await child.kill(self._cleanup_s)
            raise ToolError(f"the process of {name!r} ended with exit code {code}") from None
        except BaseException:
            await child.kill(self._cleanup_s)
            raise
        self._idle.append(child)
        return reply

    async def close(self) -> None:
        """End all processes; those with a call have ended with it."""
        idle, self._idle = self._idle, []
        for child in idle:
            await child.kill(self._cleanup_s)


async def _start() -> _Child:
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with anyio.CancelScope(shield=True):  # takes a moment, and would leave the process behind
        process = await anyio.open_process(
            [sys.executable, "-m", "rollout.tools.process_child"],
            stderr=None,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
    return _Child(process)


def _result(reply: Reply) -> ToolResult:
    if reply.failure:
        raise (TransientError if reply.is_transient else ToolError)(reply.failure)
    return ToolResult(
        reply.text,
        data=reply.data,
        reward=reply.reward,
        metrics=reply.metrics,
        is_error=reply.is_error,
        end_trajectory=reply.end_trajectory,
        extra=reply.extra,
    )
