"""Which connection to an MCP server a trajectory is on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyio.abc import TaskGroup

    from rollout.tools.mcp.link import McpLink
    from rollout.tools.tool import ToolContext


class McpLinks(ABC):
    """The connections to one server."""

    @abstractmethod
    async def take(self, context: ToolContext) -> McpLink:
        """The connection for one tool of a trajectory; `give_back` lets it go.

        Raises:
            ToolError: It cannot be made.
        """

    @abstractmethod
    async def give_back(self, link: McpLink) -> None:
        """One user of the connection less."""


class SharedLinks(McpLinks):
    """A few for all trajectories."""

    def __init__(self, links: Sequence[McpLink]) -> None:
        self._links = links

    async def take(self, context: ToolContext) -> McpLink:
        link = min(self._links, key=lambda link: link.users)
        link.users += 1
        return link

    async def give_back(self, link: McpLink) -> None:
        link.users -= 1


class OwnLinks(McpLinks):
    """One for each trajectory, made with its first tool and ended with its last.

    Args:
        tasks: Where the connections' tasks run.
        new_link: Makes a connection that is not up yet.
    """

    def __init__(self, tasks: TaskGroup, new_link: Callable[[], McpLink]) -> None:
        self._tasks = tasks
        self._new_link = new_link
        self._links: dict[int, McpLink] = {}  # by the state that the trajectory's tools share

    async def take(self, context: ToolContext) -> McpLink:
        link = self._links.get(id(context.state))
        if link is None:  # a trajectory opens its tools one after another
            link = self._new_link()
            await self._tasks.start(link.keep)
            self._links[id(context.state)] = link
        link.users += 1
        return link

    async def give_back(self, link: McpLink) -> None:
        link.users -= 1
        if link.users == 0:
            self._links = {key: kept for key, kept in self._links.items() if kept is not link}
            await link.leave()
