"""Tools that come with something to open and close, such as the connection to their server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rollout.tools.tool import Tool


class ToolProvider(ABC):
    """Has several tools while it is open; may stand among the tools of `load_tools`."""

    @abstractmethod
    async def __aenter__(self) -> list[Tool]:
        """Its tools."""

    async def __aexit__(self, *error: object) -> None:  # noqa: B027  (most hold nothing)
        """Release what they hold."""


@asynccontextmanager
async def open_tools(tools: Sequence[Any]) -> AsyncIterator[list[Any]]:
    """The tools, with those in place of each async context manager that it gives when entered.

    Entered in order and left in the reverse one, when the block ends.

    Raises:
        ToolError: As the context managers do.
    """
    async with AsyncExitStack() as stack:
        opened: list[Any] = []
        for tool in tools:
            if hasattr(tool, "__aenter__"):
                opened += await stack.enter_async_context(tool)
            else:
                opened.append(tool)
        yield opened
