"""Child processes for tools whose code must not share an interpreter with the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.child_processes import ChildDiedError, ChildProcesses
from rollout.errors import ToolError
from rollout.function_refs import FunctionRef, describe_slow_import
from rollout.tools.policy import TransientError
from rollout.tools.results import ToolResult

if TYPE_CHECKING:
    from collections.abc import Sequence


class Request(msgspec.Struct, tag=True):
    """One call, as it crosses the pipe to the process."""

    function: FunctionRef
    name: str
    arguments: dict[str, Any]


class Load(msgspec.Struct, tag=True):
    """Functions to import, before any is called."""

    functions: list[FunctionRef]


class Reply(msgspec.Struct, omit_defaults=True):
    """What a call gave.

    Attributes:
        result: The fields of a `ToolResult`; its images and videos are encoded files.
        failure: What was raised, in words; empty where nothing was.
        is_transient: Whether the tool's policy calls that transient.
    """

    result: dict[str, Any] = {}
    failure: str = ""
    is_transient: bool = False


class ToolProcesses:
    """A pool of child processes, each running one call at a time and kept for the next one.

    Args:
        max_processes: Calls that run at once; further ones wait.
        cleanup_s: Seconds for the end of a process that was killed.
    """

    def __init__(self, *, max_processes: int, cleanup_s: float) -> None:
        self._processes = ChildProcesses(
            "rollout.tools.process_child", max_processes=max_processes, cleanup_s=cleanup_s
        )

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
        async with self._processes.worker() as worker:
            try:
                reply = await worker.ask(request)
            except ChildDiedError as error:
                raise ToolError(f"the process of {name!r} {error}") from None
        answer = msgspec.msgpack.decode(reply, type=Reply)
        if answer.failure:
            raise (TransientError if answer.is_transient else ToolError)(answer.failure)
        return ToolResult(**answer.result)

    async def prepare(self, functions: Sequence[FunctionRef], limit_s: float | None) -> None:
        """Have a process import the functions, in this time.

        Raises:
            ToolError: It cannot; says why.
        """
        load = msgspec.msgpack.encode(Load(list(functions)))
        try:
            with anyio.fail_after(limit_s):
                async with self._processes.worker() as worker:
                    body = await worker.ask(load)
        except TimeoutError:
            failure = describe_slow_import(functions, f"limits.tool_s = {limit_s:g} s")
        except ChildDiedError as error:
            failure = f"the process {error}"
        else:
            failure = msgspec.msgpack.decode(body, type=Reply).failure
        if failure:
            raise ToolError(
                f"isolation = 'process': a function cannot be imported in its process: {failure}"
            )

    async def close(self) -> None:
        """End all processes; those with a call have ended with it."""
        await self._processes.close()
