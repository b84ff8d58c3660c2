"""The calls of one turn on their way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.types import ToolCall

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rollout.limits import Limit
    from rollout.tools.call_events import CallEvents
    from rollout.tools.open_sessions import OpenSessions
    from rollout.tools.results import ToolResult
    from rollout.tools.tool import ToolSession

#: A call and its position among those of its turn.
PlacedCall = tuple[int, ToolCall]


class CallTurn:
    """The calls of one turn on their way: their results, and those of them that are to run.

    Args:
        count: Of the calls.
        limit: Within which all must have been answered.
        known: Names of the tools that may be called.
        told: Tells of them; None where nobody reads.

    Attributes:
        sessions: By tool, once all are open: another conversation may have one replaced later.
    """

    __slots__ = ("known", "limit", "pending", "results", "sessions", "told")

    def __init__(
        self,
        count: int,
        limit: Limit,
        known: Collection[str],
        told: CallEvents | None = None,
    ) -> None:
        self.results: list[ToolResult | None] = [None] * count
        self.pending: list[PlacedCall] = []
        self.sessions: Mapping[str, ToolSession] = {}
        self.limit, self.known = limit, known
        self.told = told

    def answer(self, position: int, result: ToolResult) -> None:
        """Answer a call that is not going to run."""
        self.results[position] = result
        self.pending = [placed for placed in self.pending if placed[0] != position]

    def unopened(self, sessions: OpenSessions) -> list[PlacedCall]:
        """Those that are to run whose tool is not open."""
        return [placed for placed in self.pending if placed[1].name not in sessions]

    def lanes(self) -> list[list[PlacedCall]]:
        """Those that are to run; calls of one lane must not run at once."""
        lanes: dict[int, list[PlacedCall]] = {}
        for placed in self.pending:
            position, call = placed
            serial = self.sessions[call.name].serial
            lanes.setdefault(-1 - position if serial is None else id(serial), []).append(placed)
        return list(lanes.values())
