"""The events of the calls of one turn, made while somebody reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.observe.event_stream import EventStream
from rollout.observe.events import ToolEnded, ToolStarted
from rollout.types import ToolCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.tools.results import ToolResult
    from rollout.types import InvalidToolCall

#: Characters of an error that an event says.
SHOWN = 200


class CallEvents(msgspec.Struct, frozen=True):
    """Emits the events of the calls of one turn: of this trajectory, turn and conversation."""

    events: EventStream
    trajectory: int
    turn: int
    path: str

    def emit_started(self, position: int, tool: str, now: float) -> None:
        """A call begins."""
        if self.events.tells_all:
            event = ToolStarted(
                at=self.events.since_start(now),
                trajectory=self.trajectory,
                tool=tool,
                turn=self.turn,
                position=position,
                path=self.path,
            )
            self.events.emit(event)

    def emit_ended(
        self,
        position: int,
        call: ToolCall | InvalidToolCall,
        result: ToolResult | None,
        began: float,
        now: float,
        *,
        is_refused: bool,
    ) -> None:
        """It has its result; None: it was cancelled."""
        # The text, and not the result, which may hold anything else.
        text, is_error = (None, True) if result is None else (result.text, result.is_error)
        facts = (self.turn, self.path, position, call, is_error, text, began, now, is_refused)
        self.events.tell(_make_tool_ended, (self.trajectory, *facts))


def _make_tool_ended(
    start: float, facts: Sequence[Any]
) -> tuple[ToolEnded, tuple[ToolCall | InvalidToolCall, str | None]]:
    trajectory, turn, path, position, call, is_error, text, began, now, is_refused = facts
    name, call_id = (call.name, call.id or "") if isinstance(call, ToolCall) else ("", "")
    event = ToolEnded(
        at=now - start,
        trajectory=trajectory,
        tool=name,
        turn=turn,
        began=began - start,
        position=position,
        path=path,
        call_id=call_id,
        is_refused=is_refused,
        is_error=is_error,
        error=("cancelled" if text is None else text[:SHOWN]) if is_error else "",
        characters=len(text or ""),
    )
    return event, (call, text)
