"""The process of ``isolation="process"``: runs one call after another for the driver.

Requests come on standard input, replies go to standard output: u32 little-endian length, then
msgpack. What a tool prints goes to standard error. The process ends when its input closes, with all
of its group; while a call runs, the kernel does that by a signal, also where the call's code never
releases the interpreter.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import inspect
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.tools.attempt import describe
from rollout.tools.function import FunctionTool
from rollout.tools.parameters import Parameters, inspect_parameters
from rollout.tools.policy import ToolPolicy
from rollout.tools.results import normalise_result
from rollout.tools.tool_process_messages import LENGTH, FunctionRef, Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

#: Longest reply, in bytes.
MAX_REPLY = 64 * 2**20


def serve() -> None:
    """Answer requests until standard input closes."""
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    flags = fcntl.fcntl(requests, fcntl.F_GETFL)
    fcntl.fcntl(requests, fcntl.F_SETOWN, -os.getpgrp())
    with open(requests, "rb", buffering=0) as source, open(replies, "wb") as sink:
        while (header := _read(source, LENGTH.size)) is not None:
            body = _read(source, *LENGTH.unpack(header))
            if body is None:
                return
            # From here until the reply, input can only be its end: the signal then ends us.
            fcntl.fcntl(requests, fcntl.F_SETFL, flags | os.O_ASYNC)
            reply = _encoded(_answer(msgspec.msgpack.decode(body, type=Request)))
            fcntl.fcntl(requests, fcntl.F_SETFL, flags)
            sink.write(LENGTH.pack(len(reply)) + reply)
            sink.flush()


def _read(source: Any, count: int) -> bytes | None:
    parts = b""
    while len(parts) < count:
        part = source.read(count - len(parts))
        if not part:
            return None
        parts += part
    return parts


def _encoded(reply: Reply) -> bytes:
    try:
        encoded = msgspec.msgpack.encode(reply)
    except Exception:  # data that only this process can hold stays here; the text has its words
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(reply, data=None, metrics={}))
    if len(encoded) <= MAX_REPLY:
        return encoded
    failure = f"the tool's answer has {len(encoded)} bytes; at most {MAX_REPLY}"
    return msgspec.msgpack.encode(Reply(failure=failure))


def _answer(request: Request) -> Reply:
    policy = ToolPolicy()
    try:
        function, parameters, policy = _resolved(request.function, request.name)
        answer = function(**parameters.check(request.arguments))
        if inspect.isawaitable(answer):
            answer = anyio.run(_awaited, answer)
        result = normalise_result(answer)
    except BaseException as error:
        return Reply(failure=describe(error), is_transient=policy.is_transient(error))
    return Reply(
        text=result.text,
        data=result.data,
        reward=result.reward,
        metrics=dict(result.metrics),
        is_error=result.is_error,
        end_trajectory=result.end_trajectory,
        extra=dict(result.extra),
    )


async def _awaited(answer: Any) -> Any:
    return await answer


@functools.cache
def _resolved(ref: FunctionRef, name: str) -> tuple[Callable[..., Any], Parameters, ToolPolicy]:
    found: Any = _module_of(ref)
    for part in ref.qualname.split("."):
        found = getattr(found, part)
    if isinstance(found, FunctionTool):
        return found.function, found.parameters, found.policy
    return found, inspect_parameters(found, name, is_documented=False), ToolPolicy()


@functools.cache
def _module_of(ref: FunctionRef) -> ModuleType:
    from rollout.user_files import run_file

    return run_file(Path(ref.file)) if ref.file else importlib.import_module(ref.module)


if __name__ == "__main__":
    serve()
    if os.getpgrp() == os.getpid():  # what tools have started and left behind
        os.killpg(0, signal.SIGKILL)
