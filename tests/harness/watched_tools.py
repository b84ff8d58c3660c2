"""Tools and simulated users that record when they are used and whether they are closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from rollout.interactions import Interaction, InteractionContext, InteractionTurn
from rollout.tools.tool import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.interactions import InteractionFactory
    from rollout.types import Message, ToolCall


class InjectedError(Exception):
    """What the harness lets a tool, a simulated user or a starting engine raise."""


class FaultInjector:
    """Lets the next answer of a tool or of a simulated user be an error, once it is armed."""

    def __init__(self) -> None:
        self.is_armed = False

    def check(self) -> None:
        """Raise where it is armed, and disarm it."""
        if self.is_armed:
            self.is_armed = False
            raise InjectedError("injected by the harness")


class Use:
    """A tool's session, or a simulated user, in one trajectory.

    Attributes:
        name: Of the tool or the interaction.
        is_tool: Whether it is a tool.
        runs: ``[start, end]`` of each answer; the end is None while it is under way.
        closes: How often it was closed (finished).
    """

    __slots__ = ("closes", "is_tool", "name", "runs")

    def __init__(self, name: str, *, is_tool: bool) -> None:
        self.name = name
        self.is_tool = is_tool
        self.runs: list[list[float | None]] = []
        self.closes = 0

    def begin(self) -> list[float | None]:
        """Record that an answer begins; its end is the caller's to set."""
        run: list[float | None] = [anyio.current_time(), None]
        self.runs.append(run)
        return run


class WatchedTool(Tool):
    """A tool around another one."""

    def __init__(
        self, tool: Tool, record: Callable[[str, int, Use], None], fault_injector: FaultInjector
    ) -> None:
        self.name = tool.name
        self.schema = tool.schema
        self._tool = tool
        self._record = record
        self._fault_injector = fault_injector

    async def open(self, context: ToolContext) -> ToolSession:
        """See `Tool.open`."""
        session = await self._tool.open(context)
        if not isinstance(session, ToolSession):
            return session
        use = Use(self.name, is_tool=True)
        self._record(context.uid, context.member, use)
        return _WatchedSession(session, use, self._fault_injector)


class _WatchedSession(ToolSession):
    def __init__(self, session: ToolSession, use: Use, fault_injector: FaultInjector) -> None:
        self.serial = session.serial
        self._session = session
        self._use = use
        self._fault_injector = fault_injector

    async def execute(self, call: ToolCall) -> Any:
        run = self._use.begin()
        try:
            self._fault_injector.check()
            answer = await self._session.execute(call)
            self._fault_injector.check()  # armed meanwhile: then this call is the next to answer
            return answer
        finally:
            run[1] = anyio.current_time()

    async def calc_reward(self) -> float | None:
        return await self._session.calc_reward()

    async def close(self) -> None:
        self._use.closes += 1
        await self._session.close()


class WatchedInteractions:
    """A factory of simulated users around another one."""

    def __init__(
        self,
        factory: InteractionFactory,
        record: Callable[[str, int, Use], None],
        fault_injector: FaultInjector,
    ) -> None:
        self.name = factory.name
        self._factory = factory
        self._record = record
        self._fault_injector = fault_injector

    def __call__(self) -> Interaction:
        """A watched user."""
        return _WatchedInteraction(self.name, self._factory(), self._record, self._fault_injector)


class _WatchedInteraction(Interaction):
    def __init__(
        self,
        name: str,
        interaction: Interaction,
        record: Callable[[str, int, Use], None],
        fault_injector: FaultInjector,
    ) -> None:
        self.name = name
        self._interaction = interaction
        self._record = record
        self._use = Use(name, is_tool=False)
        self._fault_injector = fault_injector

    async def start(self, context: InteractionContext) -> None:
        self._record(context.uid, context.member, self._use)
        await self._interaction.start(context)

    async def respond(self, messages: Sequence[Message | Mapping[str, Any]]) -> InteractionTurn:
        run = self._use.begin()
        try:
            self._fault_injector.check()
            turn = await self._interaction.respond(messages)
            self._fault_injector.check()
            return turn
        finally:
            run[1] = anyio.current_time()

    async def finish(self) -> None:
        self._use.closes += 1
        await self._interaction.finish()
