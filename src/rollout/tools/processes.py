"""Child processes for tools whose code must not share an interpreter with the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.child_processes import (
    ChildDiedError,
    ChildProcesses,
    ChildRaisedError,
    NotImportedError,
)
from rollout.errors import ToolError
from rollout.tools.policy import TransientError
from rollout.tools.results import ToolResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.function_refs import FunctionRef


class ToolProcesses:
    """A pool of child processes, each running one call at a time and kept for the next one."""

    def __init__(self, *, max_processes: int, cleanup_s: float) -> None:
        self._children = ChildProcesses(
            "rollout.tools.process_child", max_processes=max_processes, cleanup_s=cleanup_s
        )
        self.close = self._children.close

    async def run(self, name: str, function: FunctionRef, arguments: dict[str, Any]) -> ToolResult:
        """What the function returns; cancellation kills its process with the process's group.

        Raises:
            ToolError: It raised, or its process died.
            TransientError: It raised what its policy calls transient.
        """
        try:
            body = msgspec.msgpack.encode((name, arguments))
        except (TypeError, ValueError, OverflowError) as error:  # tools_kwargs hold any object
            raise ToolError(f"{name}: its arguments are not plain data: {error}") from error
        try:
            async with self._children.worker() as child:
                return ToolResult(**msgspec.msgpack.decode(await child.ask(function, body)))
        except ChildDiedError as error:
            raise ToolError(f"the process of {name!r} {error}") from None
        except ChildRaisedError as error:
            is_transient = error.cause.type == TransientError.__qualname__
            raise (TransientError if is_transient else ToolError)(error.cause.message) from None

    async def prepare(self, functions: Sequence[FunctionRef], limit_s: float | None) -> None:
        """Have a process import the functions, in this time.

        Raises:
            ToolError: It cannot; says why.
        """
        try:
            await self._children.prepare(functions, limit_s, "limits.tool_s")
        except NotImportedError as error:
            raise ToolError(f"isolation = 'process': {error}") from error
