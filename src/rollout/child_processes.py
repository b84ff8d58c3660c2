"""Child processes for code of users that must not share an interpreter with the event loop."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
from anyio.streams.buffered import BufferedByteReceiveStream

from rollout.child_serving import BEGUN, LENGTH
from rollout.limits import cleanup_scope
from rollout.scopes import open_task_group, release_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import Process

#: Runs the module that is named, where its imports find what ours do. The environment is left as it
#: is: programs that the user's code starts there have it too, which may be of another Python.
_RUN = """
import sys
module, lifeline, *sys.path = sys.argv[1:]
sys.argv[:] = [module, lifeline]
import importlib
importlib.import_module(module).main()
"""
#: Rounds of the loop in which what a process had written before its end is read, a few pipes full.
_LAST_PASSES = 100


class ChildDiedError(Exception):
    """A child process ended before it had answered.

    Attributes:
        exit_code: Below 0 the number of the signal that killed it.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"ended with exit code {exit_code}")
        self.exit_code = exit_code


class DiedIdleError(Exception):
    """A child process had ended before it began with a request; there is a new one to be asked."""


class _Child:
    """One process, and the frames to and from it; it ends when `lifeline` is closed.

    Attributes:
        has_begun: Whether it has begun with the latest request.
        has_answered: Whether it has answered one.
    """

    def __init__(self, process: Process, lifeline: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._lifeline = lifeline
        self._requests = process.stdin
        self._replies = BufferedByteReceiveStream(process.stdout)
        self.has_begun = self.has_answered = False

    async def ask(self, request: bytes) -> bytes:
        """The reply to a request; after a cancellation the process is of no more use."""
        self.has_begun = False
        async with open_task_group() as tasks:
            tasks.start_soon(self._end)
            await self._requests.send(LENGTH.pack(len(request)) + request)
            await self._replies.receive_exactly(len(BEGUN))
            self.has_begun = True
            (length,) = LENGTH.unpack(await self._replies.receive_exactly(LENGTH.size))
            reply = await self._replies.receive_exactly(length)
            self.has_answered = True
            return reply

    async def _end(self) -> None:
        """Raise once the process has ended: what it has started may hold its pipes open."""
        await self.process.wait()
        for _ in range(_LAST_PASSES):
            await anyio.lowlevel.checkpoint()
        raise anyio.IncompleteRead

    async def kill(self, cleanup_s: float) -> int | None:
        """End the process and all others of its group; its exit code."""
        os.close(self._lifeline)
        with cleanup_scope(cleanup_s):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
            await self.process.aclose()
        return self.process.returncode


class Worker:
    """A place among the processes, and the process that has it; see `ChildProcesses.worker`.

    Attributes:
        is_new: Whether the process had answered nothing before.
    """

    def __init__(self, module: str, child: _Child | None, *, cleanup_s: float) -> None:
        self.is_new = child is None or not child.has_answered
        self.child = child
        self._module = module
        self._cleanup_s = cleanup_s

    async def start(self) -> None:
        """Have a process of its own."""
        self.child, self.is_new = await _start(self._module), True

    async def ask(self, request: bytes) -> bytes:
        """Its reply; cancellation kills the process with the process's group.

        Raises:
            ChildDiedError: It ended before it had answered.
            DiedIdleError: It was no new one, and ended before it had begun.
        """
        assert self.child is not None
        child, self.child = self.child, None
        try:
            reply = await child.ask(request)
        except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            exit_code = await child.kill(self._cleanup_s)
            if self.is_new or child.has_begun:
                raise ChildDiedError(exit_code) from None
            await self.start()
            raise DiedIdleError from None
        except BaseException:
            await child.kill(self._cleanup_s)
            raise
        self.child = child
        return reply


class ChildProcesses:
    """A pool of child processes, each answering one request at a time and kept for the next one.

    One that died, or was killed because its request was cancelled, is replaced when it is missed.

    Args:
        module: Whose `main` a process runs, which calls `child_serving.serve`.
        max_processes: Those at work at once; further requests wait.
        cleanup_s: Seconds for the end of a process that was killed.
    """

    def __init__(self, module: str, *, max_processes: int, cleanup_s: float) -> None:
        self._module = module
        self._places = anyio.CapacityLimiter(max_processes)
        self._cleanup_s = cleanup_s
        self._idle: list[_Child] = []

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """A process for the requests of the block; waits for one that is free."""
        borrower = object()
        worker: Worker | None = None
        try:
            await self._places.acquire_on_behalf_of(borrower)
            child = self._idle.pop() if self._idle else None
            worker = Worker(self._module, child, cleanup_s=self._cleanup_s)
            if child is None:
                await worker.start()
            yield worker
        finally:
            if worker is not None and worker.child is not None:
                self._idle.append(worker.child)
            release_token(self._places, borrower)

    async def close(self) -> None:
        """End all processes; those with a request have ended with it."""
        idle, self._idle = self._idle, []
        for child in idle:
            await child.kill(self._cleanup_s)


async def _start(module: str) -> _Child:
    paths = [path or os.getcwd() for path in sys.path]
    theirs, ours = os.pipe()
    try:
        with anyio.CancelScope(shield=True):  # takes a moment, and would leave the process behind
            process = await anyio.open_process(
                [sys.executable, "-c", _RUN, module, str(theirs), *paths],
                stderr=None,
                start_new_session=True,
                pass_fds=[theirs],
            )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return _Child(process, ours)
