"""Engines in child processes behind loopback sockets."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import sys
from collections import deque
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.text import TextReceiveStream

from rollout.engine.channel.child import ChildReady, ChildSpec
from rollout.engine.channel.sockets import connect_engine
from rollout.engine.placement.placement import CoreSpec, ReplicaHandle
from rollout.errors import EngineError
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import ByteStream, Process

logger = logging.getLogger("rollout.engine")

#: From telling a child to leave to killing it.
STOP_S = 1.0
#: The same where it has not answered yet, and there is nothing to close.
STARTING_STOP_S = 0.5
#: Longest answer of a starting child, in bytes.
MAX_ANSWER = 65536
#: How long what was written before an answer is waited for.
READ_S = 1.0
#: Lines that are kept; of these as many are shown of a process that said nothing else.
_KEPT, _SHOWN = 200, 20
#: Exceptions that are shown beside an engine's own error, and characters of each.
_CAUSES, _WIDTH = 3, 300
#: The last line of a traceback, perhaps after the time of a log: a type, and mostly a message.
_EXCEPTION = re.compile(
    r"(?:\[[^\]]*\] *)?((?:\w+\.)*(\w*(?:Error|Exception|Exit|Expired|Interrupt)(?:: .*)?))"
)

#: What the engine's side imports whatever its core is.
_LACKING = re.compile(r"No module named '(rollout|anyio|msgspec)'")


def child_command(python: str | None) -> list[str]:
    """What runs an engine for this process; with its own interpreter where none is named."""
    return [python or sys.executable, "-m", "rollout.engine.channel.child", str(os.getpid())]


def encode_spec(
    spec: CoreSpec,
    secret: bytes,
    *,
    with_sys_path: bool,
    host: str = "127.0.0.1",
    is_follower: bool = False,
) -> bytes:
    """What a child reads: a `ChildSpec` as JSON, with our module search path or without."""
    return msgspec.json.encode(
        ChildSpec(
            core=spec.core,
            options=spec.options,
            secret=secret.hex(),
            host=host,
            sys_path=[path or os.getcwd() for path in sys.path] if with_sys_path else [],
            tls=spec.tls,
            is_follower=is_follower,
            log_level=logger.getEffectiveLevel(),
        )
    )


class LocalProcess:
    """The placement `local_process`.

    Each child runs in a session of its own (a Ctrl-C in the terminal reaches the driver only) and
    ends with the driver, also where a fork of the driver lives on.

    Args:
        python: Interpreter of the children; None takes this one, with its module search path.
    """

    def __init__(self, *, python: str | None = None) -> None:
        self._python = python

    @asynccontextmanager
    async def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AsyncIterator[ReplicaHandle]:
        """See `Placement.open_replica`."""
        secret = secrets.token_bytes(32)
        command = child_command(self._python)
        try:
            with anyio.CancelScope(shield=True):  # asyncio would forget a process just begun
                process = await anyio.open_process(command, start_new_session=True)
        except OSError as error:
            raise EngineError(f"{name}: cannot run {command[0]!r}: {error}") from error
        died = anyio.Event()
        last_output = LastOutput()
        patience_s = STARTING_STOP_S
        try:
            async with open_task_group() as tasks:
                tasks.start_soon(_forward_errors, name, process, last_output)
                tasks.start_soon(_watch, process, died)
                line = encode_spec(spec, secret, with_sys_path=self._python is None)
                try:
                    port = await self._start(process, line, start_timeout_s, last_output)
                except EngineError as error:
                    raise EngineError(f"{name}: {error}") from None
                patience_s = STOP_S

                async def connect() -> ByteStream:
                    return await connect_engine("127.0.0.1", port, spec.tls)

                yield ReplicaHandle(connect, secret, died)
        finally:
            await _stop(process, patience_s)

    async def release(self, name: str) -> None:
        """Nothing is kept."""

    async def _start(
        self, process: Process, line: bytes, start_timeout_s: float, last_output: LastOutput
    ) -> int:
        """Have the child start its engine; returns the port."""
        assert process.stdin is not None
        assert process.stdout is not None
        answer = BufferedByteReceiveStream(process.stdout)
        try:
            with anyio.fail_after(start_timeout_s):
                await process.stdin.send(line + b"\n")
                ready = msgspec.json.decode(
                    await answer.receive_until(b"\n", MAX_ANSWER), type=ChildReady
                )
        except TimeoutError:
            reason = f"not ready after engine.start_timeout_s = {start_timeout_s:g} s"
        except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            reason = last_output.describe_exit(await process.wait())
        else:
            if not ready.error:
                return ready.port
            with anyio.move_on_after(READ_S):
                await process.wait()
            reason = last_output.describe_error(ready.error)
        raise EngineError(reason)


async def _forward_errors(name: str, process: Process, last_output: LastOutput) -> None:
    """Log what the child writes to standard error, and keep its end for error texts."""
    assert process.stderr is not None
    rest = ""
    async for text in TextReceiveStream(process.stderr, errors="replace"):
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            last_output.add(line)
            logger.info("%s: %s", name, line)


async def _watch(process: Process, died: anyio.Event) -> None:
    await process.wait()
    died.set()


async def _stop(process: Process, patience_s: float) -> None:
    """End the child: it is told to leave, and what is left after `patience_s` is killed.

    So are processes that the child has started and left behind: its session is a group.
    """
    with anyio.CancelScope(shield=True):
        assert process.stdin is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            with anyio.move_on_after(patience_s):
                await process.stdin.send(b"\n")  # a fork of ours may hold the pipe open
            await process.stdin.aclose()
        with anyio.move_on_after(patience_s):
            await process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await process.aclose()


class LastOutput:
    """The last lines of standard error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self.add = self._lines.append

    def describe_exit(self, code: int) -> str:
        """Why a process ended that was to start an engine."""
        shown = [*self._lines][-_SHOWN:]
        last = f"; it said last:{_list_lines(shown)}" if shown else ""
        lacking = _LACKING.search("\n".join(shown))
        if lacking is not None:
            last += (
                f"\n  placement.python needs the package {lacking[1]} in its environment: "
                "`pip install anyio msgspec`, and this library by `pip install --no-deps`"
            )
        return f"the engine's process ended with exit code {code} while starting{last}"

    def describe_error(self, error: str) -> str:
        """An engine's own error, and exceptions before it: one of its processes may know more."""
        found: dict[str, None] = {}
        known = error.split("\n")[0]
        for line in [*self._lines]:  # another thread may add more meanwhile
            match = _EXCEPTION.fullmatch(line)
            if match is not None and match[2] not in error and not match[1].endswith(known):
                found[match[1][:_WIDTH]] = None
        causes = [*found][-_CAUSES:]
        return f"{error}; before that was said:{_list_lines(causes)}" if causes else error


def _list_lines(lines: list[str]) -> str:
    return "".join(f"\n    {line}" for line in lines)
