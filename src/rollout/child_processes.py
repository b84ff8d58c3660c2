"""Child processes for functions of users that must not share an interpreter with the event loop.

The driver's side is `ChildProcesses`; `serve` is a child's. Requests go to a child's standard
input, replies come from its standard output: u32 little-endian length, then msgpack. What the
user's code prints goes to standard error. A child ends with all of its group when its input closes.
A second pipe, whose other end the driver holds and never writes to, tells of the driver's end while
a request is answered: the kernel then ends the group by a signal, also where the code never
releases the interpreter. Standard input could not tell: what the driver writes to it may set off
the signal after it has been read.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import os
import select
import signal
import struct
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from rollout.limits import cleanup_scope
from rollout.types import Cause
from rollout.user_code import FunctionRef, NotImportableError, function_at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from anyio.abc import Process

#: Serves for the module that is named, where its imports find what ours do. The environment is left
#: as it is: programs that the user's code starts there have it too, which may be of another Python.
_RUN = """
import sys
module, lifeline, *sys.path = sys.argv[1:]
sys.argv[:] = [module]
from importlib import import_module
import_module("rollout.child_processes").serve(import_module(module).answer, int(lifeline))
"""
#: Before each message in either direction.
_LENGTH = struct.Struct("<I")
#: Longest answer, in bytes.
MAX_ANSWER = 64 * 2**20


class _Request(msgspec.Struct):
    """Import a function, and answer `body` with it unless that is None."""

    function: FunctionRef
    body: bytes | None


class _Reply(msgspec.Struct):
    """An answer, or what was raised."""

    body: bytes = b""
    failure: Cause | None = None


class ChildDiedError(Exception):
    """A child process ended before it had answered; says how."""

    def __init__(self, exit_code: int | None) -> None:
        if exit_code is not None and exit_code < 0:
            names = {int(each): each.name for each in signal.Signals}  # not of real-time ones
            super().__init__(f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}")
        else:
            super().__init__(f"ended with exit code {exit_code}")


class ChildRaisedError(Exception):
    """The user's code raised in its process.

    Attributes:
        cause: What it raised there.
    """

    def __init__(self, cause: Cause) -> None:
        super().__init__(f"{cause.type}: {cause.message}")
        self.cause = cause


class ChildProcess:
    """A process that answers one request at a time; see `ChildProcesses.worker`.

    It ends when `lifeline`, a pipe that nobody writes to, is closed.

    Attributes:
        is_new: Whether it has imported nothing yet.
    """

    def __init__(self, process: Process, lifeline: int, cleanup_s: float) -> None:
        self.is_new = True
        self._process, self._cleanup_s = process, cleanup_s
        self._lifeline = os.fdopen(lifeline, "wb", buffering=0)
        assert process.stdout is not None
        self._replies = BufferedByteReceiveStream(process.stdout)

    @property
    def is_killed(self) -> bool:
        """Whether it was ended from here."""
        return self._lifeline.closed

    @property
    def has_died(self) -> bool:
        """Whether it has ended by itself, or by others."""
        return self._process.returncode is not None

    async def ask(self, function: FunctionRef, body: bytes | None = None) -> bytes:
        """Have the process import a function, and answer `body` with it unless that is None.

        Cancellation kills the process with the process's group.

        Raises:
            ChildDiedError: It ended before it had answered.
            ChildRaisedError: The import or the function raised.
        """
        request = msgspec.msgpack.encode(_Request(function, body))
        try:
            assert self._process.stdin is not None
            await self._process.stdin.send(_LENGTH.pack(len(request)) + request)
            (length,) = _LENGTH.unpack(await self._replies.receive_exactly(_LENGTH.size))
            data = await self._replies.receive_exactly(length)
        except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise ChildDiedError(await self.kill()) from None
        except BaseException:
            await self.kill()
            raise
        self.is_new = False
        reply = msgspec.msgpack.decode(data, type=_Reply)
        if reply.failure is not None:
            raise ChildRaisedError(reply.failure)
        return reply.body

    async def kill(self) -> int | None:
        """End the process and all others of its group; its exit code."""
        self._lifeline.close()
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
        module: Whose ``answer(found, body) -> bytes`` a child calls with what a `FunctionRef` leads
            to; an exception of it is the caller's `ChildRaisedError`.
        max_processes: Those at work at once; further requests wait.
        cleanup_s: Seconds for the end of a process that was killed.
    """

    def __init__(self, module: str, *, max_processes: int, cleanup_s: float) -> None:
        self._module, self._cleanup_s = module, cleanup_s
        self._slots = anyio.Semaphore(max_processes)
        self._idle: list[ChildProcess] = []

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[ChildProcess]:
        """A process for the requests of the block; waits for one that is free."""
        async with self._slots:
            child = self._idle.pop() if self._idle else await self._start()
            if child.has_died:  # while it idled
                await child.kill()
                child = await self._start()
            try:
                yield child
            finally:
                if not child.is_killed:
                    self._idle.append(child)

    async def prepare(
        self, functions: Sequence[FunctionRef], limit_s: float | None, limit: str
    ) -> None:
        """Have a process import the functions, each in this time, which `limit` sets.

        Raises:
            NotImportableError: It cannot.
        """
        async with self.worker() as child:
            for function in functions:
                try:
                    with anyio.fail_after(limit_s):
                        await child.ask(function)
                except TimeoutError:
                    raise NotImportableError(
                        f"{function} was not imported within {limit} = {limit_s:g} s, by a new "
                        f"process of {sys.executable}; raise the limit, import what is slow within "
                        "the function, and put what a script starts under "
                        '`if __name__ == "__main__":`'
                    ) from None
                except (ChildDiedError, ChildRaisedError) as error:
                    how = f"it {error}" if isinstance(error, ChildDiedError) else error
                    raise NotImportableError(
                        f"{function} cannot be imported in its process: {how}"
                    ) from error

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


def serve(answer: Callable[[Any, bytes], bytes], lifeline: int) -> None:
    """Answer the driver's requests until it ends; then end the group of this process.

    Args:
        answer: See `ChildProcesses`.
        lifeline: The descriptor whose other end the driver holds.
    """
    requests, replies, process = os.dup(0), os.dup(1), os.getpid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with open(requests, "rb") as source, open(replies, "wb") as sink:
        is_open = _end_with_driver(lifeline)
        while is_open and (header := source.read(_LENGTH.size)):
            reply = _reply(answer, source.read(*_LENGTH.unpack(header)))
            if os.getpid() != process:  # a copy that the code has made, and that came back from it
                os._exit(0)
            sink.write(_LENGTH.pack(len(reply)) + reply)
            sink.flush()
    if os.getpgrp() == os.getpid():  # what the user's code has started and left behind
        os.killpg(0, signal.SIGKILL)


def _end_with_driver(lifeline: int) -> bool:
    """Have the driver's end be the group's from now on; whether the driver is there."""
    os.set_inheritable(lifeline, False)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    return not select.select([lifeline], [], [], 0)[0]


def _reply(answer: Callable[[Any, bytes], bytes], data: bytes) -> bytes:
    try:
        request = msgspec.msgpack.decode(data, type=_Request)
        found = function_at(request.function)
        body = b"" if request.body is None else answer(found, request.body)
        if len(body) > MAX_ANSWER:
            raise ValueError(f"the answer takes {len(body)} bytes; at most {MAX_ANSWER}")
        return msgspec.msgpack.encode(_Reply(body))
    except BaseException as error:
        return msgspec.msgpack.encode(_Reply(failure=Cause.of(error)))


def resolve_outcome(value: Any) -> Any:
    """What a call of the user's code gave; of an async one once it has been awaited.

    All are awaited on one asyncio loop: what the code's modules keep, such as a client and its
    connections, belongs to the loop on which it was first used.
    """
    return _get_loop().run_until_complete(value) if inspect.isawaitable(value) else value


@functools.cache
def _get_loop() -> Any:
    import asyncio  # noqa: TID251  (where no other loop is; most functions need none)

    return asyncio.new_event_loop()
