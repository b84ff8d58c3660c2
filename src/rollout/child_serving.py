"""The side of a child process that answers the requests of `ChildProcesses`, one after another.

Requests come on standard input, replies go to standard output: u32 little-endian length, then the
message. What the user's code prints goes to standard error. The process ends when its input closes,
with all of its group.
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
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO

from anyio.from_thread import start_blocking_portal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.from_thread import BlockingPortal

#: Before each message in either direction.
LENGTH = struct.Struct("<I")
#: Longest reply, in bytes.
MAX_REPLY = 64 * 2**20
#: What stays open as long as the process lives.
_UNTIL_THE_END = ExitStack()


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer requests until standard input closes; then end the group of this process.

    Args:
        answer: The reply to a request, at most `MAX_REPLY` long; it must not raise.
    """
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with open(requests, "rb") as source, open(replies, "wb") as sink:
        if _ends_with(int(sys.argv[1])):
            _answer_all(answer, source, sink)
    if os.getpgrp() == os.getpid():  # what the user's code has started and left behind
        os.killpg(0, signal.SIGKILL)


def _answer_all(answer: Callable[[bytes], bytes], source: BinaryIO, sink: BinaryIO) -> None:
    process = os.getpid()
    while len(header := source.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(header)
        body = source.read(length)
        if len(body) < length:
            return
        reply = answer(body) if body else b""
        if os.getpid() != process:  # a copy that the code has made, and that came back from it
            os._exit(0)
        sink.write(LENGTH.pack(len(reply)) + reply)
        sink.flush()


def _ends_with(lifeline: int) -> bool:
    """Whether the driver is there; its end is the group's from now on."""
    os.set_inheritable(lifeline, False)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    return not select.select([lifeline], [], [], 0)[0]


def resolve_outcome(value: Any) -> Any:
    """What a call of the user's code gave; of an async one once it has been awaited.

    All are awaited on one asyncio loop: what the code's modules keep, such as a client and its
    connections, belongs to the loop on which it was first used.
    """
    if not inspect.isawaitable(value):
        return value
    answer, failure = _portal().call(_await, value)
    if failure is not None:
        raise failure
    return answer


@functools.cache
def _portal() -> BlockingPortal:
    return _UNTIL_THE_END.enter_context(start_blocking_portal())


async def _await(value: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    try:
        return await value, None
    except BaseException as error:  # raised here, a SystemExit would end the loop
        return None, error
