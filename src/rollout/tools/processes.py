"""Child processes for tools whose code must not share an interpreter with the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from rollout.child_processes import ChildDiedError, ChildProcesses
from rollout.errors import ToolError
from rollout.function_refs import FunctionRef, describe_slow_import
from rollout.tools.policy import TransientError
from rollout.tools.results import ToolResult


class Request(msgspec.Struct):
    """Functions to import in the process, and the name of the tool whose one is then called."""

    functions: Sequence[FunctionRef]
    name: str = ""
    arguments: dict[str, Any] = {}


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
    """A pool of child processes, each running one call at a time and kept for the next one."""

    def __init__(self, *, max_processes: int, cleanup_s: float) -> None:
        self._processes = ChildProcesses(
            "rollout.tools.process_child", max_processes=max_processes, cleanup_s=cleanup_s
        )

    async def _ask(self, request: Request) -> Reply:
        body = msgspec.msgpack.encode(request)
        async with self._processes.worker() as worker:
            return msgspec.msgpack.decode(await worker.ask(body), type=Reply)

    async def run(self, name: str, function: FunctionRef, arguments: dict[str, Any]) -> ToolResult:
        """What the function returns; cancellation kills its process with the process's group.

        Raises:
            ToolError: It raised, or its process died.
            TransientError: It raised what its policy calls transient.
        """
        try:
            reply = await self._ask(Request([function], name, arguments))
        except ChildDiedError as error:
            raise ToolError(f"the process of {name!r} {error}") from None
        except (TypeError, ValueError, OverflowError) as error:  # tools_kwargs hold any object
            raise ToolError(f"{name}: its arguments are not plain data: {error}") from error
        if reply.failure:
            raise (TransientError if reply.is_transient else ToolError)(reply.failure)
        media = {kind: tuple(reply.result.get(kind, ())) for kind in ("images", "videos")}
        return ToolResult(**{**reply.result, **media})

    async def prepare(self, functions: Sequence[FunctionRef], limit_s: float | None) -> None:
        """Have a process import the functions, in this time.

        Raises:
            ToolError: It cannot; says why.
        """
        try:
            with anyio.fail_after(limit_s):
                failure = (await self._ask(Request(functions))).failure
        except TimeoutError:
            failure = describe_slow_import(functions, f"limits.tool_s = {limit_s:g} s")
        except ChildDiedError as error:
            failure = f"the process {error}"
        if failure:
            raise ToolError(
                f"isolation = 'process': a function cannot be imported in its process: {failure}"
            )

    async def close(self) -> None:
        """End all processes; those with a call have ended with it."""
        await self._processes.close()
