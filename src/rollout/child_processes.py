"""Child processes for code of users that must not share an interpreter with the event loop.

The child's side is `child_serving`.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from rollout.child_serving import LENGTH
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
#: How long what a process wrote before its end is read, where a child of its own holds the pipe.
_LAST_READ_S = 0.5


class ChildDiedError(Exception):
    """A child process ended before it had answered.

    Attributes:
        exit_code: Below 0 the number of the signal that killed it.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"ended with exit code {exit_code}")
        self.exit_code = exit_code


class ChildProcess:
    """A process that answers one request at a time; see `ChildProcesses.worker`.

    It ends when `lifeline`, a pipe that nobody writes to, is closed.

    Attributes:
        is_new: Whether it has answered nothing yet.
        is_running: Whether it has not been killed.
    """

    def __init__(self, process: Process, lifeline: int, cleanup_s: float) -> None:
        self.is_new = self.is_running = True
        self._process, self._lifeline, self._cleanup_s = process, lifeline, cleanup_s
        assert process.stdout is not None
        self._replies = BufferedByteReceiveStream(process.stdout)

    async def ask(self, request: bytes) -> bytes:
        """The reply, an empty one to an empty request.

        Cancellation kills the process with the process's group.

        Raises:
            ChildDiedError: It ended before it had answered.
        """
        try:
            async with open_task_group() as tasks:
                tasks.start_soon(self._watch_end)
                assert self._process.stdin is not None
                await self._process.stdin.send(LENGTH.pack(len(request)) + request)
                (length,) = LENGTH.unpack(await self._replies.receive_exactly(LENGTH.size))
                reply = await self._replies.receive_exactly(length)
        except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise ChildDiedError(await self.kill()) from None
        except BaseException:
            await self.kill()
            raise
        self.is_new = False
        return reply

    async def _watch_end(self) -> None:
        """End the request once the process has ended: what it has started may hold its pipes."""
        await self._process.wait()
        await anyio.sleep(_LAST_READ_S)
        raise anyio.IncompleteRead

    async def kill(self) -> int | None:
        """End the process and all others of its group; its exit code."""
        self.is_running = False
        os.close(self._lifeline)
        with cleanup_scope(self._cleanup_s):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            await self._process.aclose()
        return self._process.returncode


class ChildProcesses:
    """A pool of child processes, each answering one request at a time and kept for the next one.

    One that died, or was killed because its request was cancelled, is replaced when it is missed.

    Args:
        module: Whose `main` a process runs, which calls `child_serving.serve`.
        max_processes: Those at work at once; further requests wait.
        cleanup_s: Seconds for the end of a process that was killed.
    """

    def __init__(self, module: str, *, max_processes: int, cleanup_s: float) -> None:
        self._module, self._cleanup_s = module, cleanup_s
        self._slots = anyio.CapacityLimiter(max_processes)
        self._idle: list[ChildProcess] = []

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[ChildProcess]:
        """A process for the requests of the block; waits for one that is free."""
        borrower = object()
        child: ChildProcess | None = None
        try:
            await self._slots.acquire_on_behalf_of(borrower)
            while child is None and self._idle:
                child = self._idle.pop()
                with anyio.move_on_after(self._cleanup_s), suppress(ChildDiedError):
                    await child.ask(b"")  # it may have died meanwhile, or hang
                child = child if child.is_running else None
            child = child or await self._start()
            yield child
        finally:
            if child is not None and child.is_running:
                self._idle.append(child)
            release_token(self._slots, borrower)

    async def _start(self) -> ChildProcess:
        paths = [path or os.getcwd() for path in sys.path]
        theirs, lifeline = os.pipe()
        try:
            with anyio.CancelScope(shield=True):  # a moment; it would leave the process behind
                process = await anyio.open_process(
                    [sys.executable, "-c", _RUN, self._module, str(theirs), *paths],
                    stderr=None,
                    start_new_session=True,
                    pass_fds=[theirs],
                )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(theirs)
        return ChildProcess(process, lifeline, self._cleanup_s)

    async def close(self) -> None:
        """End all processes; those with a request have ended with it."""
        idle, self._idle = self._idle, []
        for child in idle:
            await child.kill()
