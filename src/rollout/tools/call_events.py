"""What the tools of a trajectory tell of the calls of one turn, while somebody reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.observe.events import ToolEnded, ToolStarted
from rollout.types import ToolCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.observe.event_stream import EventStream
    from rollout.tools.results import ToolResult
    from rollout.types import InvalidToolCall

#: Characters of an error that an event says.
SHOWN = 200
#: What there is in place of a result where a call was cancelled.
NO_RESULT = "cancelled"


class CallEvents:
    """Tells of the calls of one turn.

    Args:
        events: Takes the events.
        trajectory, turn, path: Whose calls they are.
    """

    __slots__ = ("_events", "_path", "_trajectory", "_turn")

    def __init__(self, events: EventStream, trajectory: int, turn: int, path: str) -> None:
        self._events, self._trajectory = events, trajectory
        self._turn, self._path = turn, path

    def started(self, position: int, call: ToolCall, now: float) -> None:
        """A call begins."""
        if self._events.tells_all:
            self._events.emit(
                ToolStarted(
                    at=self._events.since_start(now),
                    trajectory=self._trajectory,
                    tool=call.name,
                    turn=self._turn,
                    position=position,
                    path=self._path,
                )
            )

    def ended(
        self,
        position: int,
        call: ToolCall | InvalidToolCall,
        result: ToolResult | None,
        began: float,
        now: float,
        *,
        is_refused: bool = False,
    ) -> None:
        """It has its result; None: it was cancelled."""
        is_error, text = (True, None) if result is None else (result.is_error, result.text)
        who = (self._trajectory, self._turn, self._path, position, call)
        # The text, and not the result, which may hold anything else.
        self._events.tell(_tool_ended, (*who, is_error, text, began, now, is_refused))


def _tool_ended(
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
        error=(NO_RESULT if text is None else text[:SHOWN]) if is_error else "",
        characters=0 if text is None else len(text),
    )
    return event, (call, text)
