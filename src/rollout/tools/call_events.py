"""The calls of one turn, and their events, which are made while somebody reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.observe.event_stream import EventStream
from rollout.observe.events import ToolEnded, ToolStarted
from rollout.tools.results import ToolResult
from rollout.types import InvalidToolCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Characters of an error that an event says.
SHOWN = 200


class CallEvents(msgspec.Struct, frozen=True):
    """Where the events of the calls of one turn go: of this trajectory, turn and conversation."""

    events: EventStream
    trajectory: int
    turn: int
    path: str


class Call(msgspec.Struct, eq=False, gc=False):
    """One call of a turn.

    Attributes:
        call: As the model wrote it; it may not be parsed.
        tool: Its name, or what stands in its place in figures.
        began: When it did, or was refused.
        events: None where nobody reads.
        checked: With the arguments that the tool gets; None where the call does not run.
        result: None until it is answered.
    """

    position: int
    call: ToolCall | InvalidToolCall
    tool: str
    began: float
    events: CallEvents | None
    checked: ToolCall | None = None
    result: ToolResult | None = None

    def emit_started(self) -> None:
        """Emit that the call begins."""
        if (to := self.events) is not None and to.events.tells_all:
            at = to.events.since_start(self.began)
            to.events.emit(ToolStarted(at=at, tool=self.tool, **self._locate(to)))

    def emit_ended(self, now: float, *, is_refused: bool) -> None:
        """Emit that the call has its result, or was cancelled."""
        if (to := self.events) is None:
            return
        call, result = self.call, self.result
        # The text, and not the result, which may hold anything else.
        text, is_error = (None, True) if result is None else (result.text, result.is_error)
        event = ToolEnded(
            at=to.events.since_start(now),
            began=to.events.since_start(self.began),
            tool=getattr(call, "name", ""),
            call_id=getattr(call, "id", "") or "",
            is_refused=is_refused,
            is_error=is_error,
            error=("cancelled" if text is None else text[:SHOWN]) if is_error else "",
            characters=len(text or ""),
            **self._locate(to),
        )
        to.events.tell(_emit_made, (to.trajectory, event, call, text))

    def _locate(self, to: CallEvents) -> dict[str, Any]:
        where = {"trajectory": to.trajectory, "turn": to.turn, "path": to.path}
        return {**where, "position": self.position}


def _emit_made(start: float, facts: Sequence[Any]) -> tuple[ToolEnded, tuple[Any, str | None]]:
    _, event, call, text = facts
    return event, (call, text)
