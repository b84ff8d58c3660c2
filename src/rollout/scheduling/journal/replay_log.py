"""The log of a trajectory that runs again on its record alone, and where it departs from it."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.lowlevel

from rollout.chat.row_beginnings import common_length
from rollout.errors import RolloutError
from rollout.limits import AGENT_TIMEOUT
from rollout.scheduling.journal.entries import AnswersEntry, TurnEntry
from rollout.scheduling.journal.given_again import (
    answers_of,
    asked_of,
    next_known,
    place_of_calls,
    place_of_turn,
    recall_into,
)
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.agents.turn_log import AskedCalls, Place
    from rollout.chat.trajectory import Trajectory
    from rollout.engine.pool.generation import Generation
    from rollout.medium import Media
    from rollout.token_prefix import TokenPrefix
    from rollout.tools.answers import Answers
    from rollout.types import InvalidToolCall, ToolCall

#: Tokens that are shown before a difference, and from it on.
_BEFORE, _AFTER = 12, 24
#: Characters of what was called.
_SHOWN = 300


class Departed(RolloutError):
    """A replayed trajectory asks what its record has no answer to; it ends by that."""


class ReplayStep(NamedTuple):
    """A question of the agent that the record answered.

    Attributes:
        number: From 1.
        what: It and its answer, in words.
    """

    number: int
    what: str


class ReplayLog:
    """Answers from the record alone; a `TurnLog`.

    Args:
        entries: Turns and answers of tools, in order.
        recorded: The trajectory as it ended; None where it had not.
        whole: Gives a medium of the record its content.
        decode: Text of ids.
        calls_in: The calls in the ids of a turn, in words.
        on_step: Called with each step.
        on_departure: Called when the record has no answer, before `Departed` is raised.

    Attributes:
        steps: So many were answered.
        departure: Why the last one was not; "" where all were.
        is_beyond: It has come to the end of a record that has no end, or that nothing of the
            agent's had ended.
    """

    has_answers = True

    def __init__(
        self,
        entries: Sequence[TurnEntry | AnswersEntry],
        recorded: Trajectory | None,
        *,
        whole: Callable[[Media], Media],
        decode: Callable[[array[int]], str],
        calls_in: Callable[[array[int]], str],
        on_step: Callable[[ReplayStep], object],
        on_departure: Callable[[], object],
    ) -> None:
        self.steps = 0
        self.departure, self.is_beyond = "", False
        self._entries, self._recorded = list(entries), recorded
        self._whole, self._decode, self._calls_in = whole, decode, calls_in
        self._on_step, self._on_departure = on_step, on_departure
        self._left: list[TurnEntry | AnswersEntry] = []
        self._by_place: dict[tuple[type, Place], deque[Any]] = {}
        #: Those that are asked just now: between them and their answers nothing else runs.
        self._calls: Sequence[ToolCall | InvalidToolCall] = ()

    def begin(self) -> None:
        """The agent begins."""
        self._left, self._by_place = list(self._entries), {}
        for entry in self._entries:
            self._by_place.setdefault((type(entry), entry.place), deque()).append(entry)

    async def recall_turn(
        self, prefix: TokenPrefix, seed: int, generation: Generation
    ) -> float | None:
        """See `TurnLog`.

        Raises:
            Departed: The record has no such turn.
        """
        place = place_of_turn(prefix, seed)
        entry = self._take(TurnEntry, place)
        if entry is None:
            raise self._departed(self._why_no_turn(place, prefix))
        count = len(entry.ids) // 4
        self._say(f"{_turn(entry)}: {count} tokens, {entry.finish_reason}")
        await anyio.lowlevel.checkpoint()
        return recall_into(generation, entry)

    def asked(
        self, prefix: TokenPrefix, calls: Sequence[ToolCall | InvalidToolCall]
    ) -> AskedCalls | None:
        """See `TurnLog`."""
        self._calls = calls
        asked = asked_of(prefix, calls)
        if asked is None:
            raise self._departed(f"calls tools with what no record can hold: {said_calls(calls)}")
        return asked

    async def recall_answers(self, asked: AskedCalls, segment: str) -> Answers | None:
        """See `TurnLog`.

        Raises:
            Departed: The record has no such calls.
        """
        calls, place = self._calls, place_of_calls(asked)
        entry = self._take(AnswersEntry, place, segment)
        if entry is None:
            raise self._departed(self._why_no_answers(place, asked.prefix, calls))
        self._say(f"calls after {_turn(entry, -1)}: {said_calls(calls)}")
        await anyio.lowlevel.checkpoint()
        return answers_of(entry, self._whole)

    async def room(self) -> None:
        """See `TurnLog`."""

    async def kept(self) -> None:
        """See `TurnLog`."""

    def note_turn(self, *_: Any) -> bool:
        """See `TurnLog`; nothing is new here."""
        return False

    def note_answers(self, *_: Any) -> bool:
        """See `TurnLog`; nothing is new here."""
        return False

    def compare(self, trajectory: Trajectory) -> None:
        """The agent has ended: see whether the record does, and in the same way."""
        recorded = self._recorded
        if self.departure or self.is_beyond:
            return
        if self._left:
            self._departed(
                f"the agent ends here ({ending(trajectory)}); the record continues with "
                f"{_name(self._left[0])}"
            )
        elif recorded is not None:
            self._compare_ends(recorded, trajectory)

    def _compare_ends(self, recorded: Trajectory, trajectory: Trajectory) -> None:
        if not _is_own(recorded):
            return  # what ended it is not here
        if _outcome(recorded) != _outcome(trajectory):
            self._departed(f"ends as {ending(trajectory)}; recorded was {ending(recorded)}")
            return
        for one, other in zip(recorded.segments, trajectory.segments, strict=False):
            then, now = one.transcript.prefix.ids, other.transcript.prefix.ids
            if then != now:
                self._departed(f"ends with other tokens: {self._difference(now, then)}")
                return
        if len(recorded.segments) != len(trajectory.segments):
            self._departed(
                f"ends with {len(trajectory.segments)} segments; recorded were "
                f"{len(recorded.segments)}"
            )

    def _take(self, kind: type, place: Place, segment: str | None = None) -> Any:
        if self.departure or self.is_beyond:
            raise Departed(self.departure or "the record has ended")
        entry = next_known(self._by_place, (kind, place), segment)
        if entry is not None:
            self._left.remove(entry)
        return entry

    def _say(self, what: str) -> None:
        self.steps += 1
        self._on_step(ReplayStep(self.steps, what))

    def _departed(self, why: str) -> Departed:
        recorded = self._recorded
        is_whole = recorded is not None and _is_own(recorded)
        if not self._left and not is_whole:
            self.is_beyond = True
        else:
            self.departure = why
        self._on_departure()
        return Departed(why)

    def _why_no_turn(self, place: Place, prefix: TokenPrefix) -> str:
        turns = [each for each in self._entries if isinstance(each, TurnEntry)]
        seeded = [each for each in turns if each.place[2] == place[2]]
        if seeded:
            what = f"asks the model for {_turn(seeded[0])} after other tokens"
            return f"{what}: {self._difference_to(seeded[0], prefix)}"
        same = [each for each in turns if each.place[:2] == place[:2]]
        if same:
            return (
                f"asks the model with seed {place[2]} after {place[0]} tokens; recorded was seed "
                f"{same[0].place[2]}, of {_turn(same[0])}"
            )
        if self._left and isinstance(due := self._left[0], TurnEntry):  # of another conversation
            what = f"asks the model for what is not {_turn(due)}, the next one"
            return f"{what}: {self._difference_to(due, prefix)}"
        return f"asks the model after {place[0]} tokens; {self._next()}"

    def _why_no_answers(
        self, place: Place, prefix: TokenPrefix, calls: Sequence[ToolCall | InvalidToolCall]
    ) -> str:
        answers = [each for each in self._entries if isinstance(each, AnswersEntry)]
        same = [each for each in answers if each.place[:2] == place[:2]]
        if same:
            spoken = self._recorded_calls(same[0])
            return f"makes other calls: {said_calls(calls)}{spoken and f'; recorded: {spoken}'}"
        length = [each for each in answers if each.place[0] == place[0]]
        alike = [each for each in answers if each.place[2] == place[2]]
        for each in (*alike, *length):
            return (
                f"makes the calls after {_turn(each, -1)} after other tokens: "
                f"{self._difference_to(each, prefix)}"
            )
        return f"calls tools after {place[0]} tokens: {said_calls(calls)}; {self._next()}"

    def _next(self) -> str:
        if self._left:
            return f"the record has {_name(self._left[0])} next"
        ended = "" if self._recorded is None else f": {ending(self._recorded)}"
        return f"the record has ended{ended}"

    def _recorded_calls(self, entry: AnswersEntry) -> str:
        turns = [each for each in self._entries if isinstance(each, TurnEntry)]
        for each in turns:
            if (each.segment, each.turn) == (entry.segment, entry.turn - 1):
                return self._calls_in(array("i", each.ids))
        return ""

    def _difference_to(self, entry: TurnEntry | AnswersEntry, prefix: TokenPrefix) -> str:
        length, digest, _ = entry.place
        for segment in () if self._recorded is None else self._recorded.segments:
            packed = segment.transcript.prefix.packed(0, length)
            if zlib.crc32(packed) == digest:
                return self._difference(prefix.ids, segment.transcript.prefix.slice(0, length))
        return f"{len(prefix)} now, {length} recorded"

    def _difference(self, now: array[int], then: array[int]) -> str:
        at = common_length(now, then)
        begin = max(0, at - _BEFORE)
        shown = [self._decode(ids[begin : at + _AFTER]) for ids in (now, then)]
        return (
            f"{len(now)} now, {len(then)} recorded; from token {at} on they differ: "
            f"now {shown[0]!r}, recorded {shown[1]!r}"
        )


def _turn(entry: TurnEntry | AnswersEntry, by: int = 0) -> str:
    return f"turn {entry.turn + by + 1} of {entry.segment}"


def _name(entry: TurnEntry | AnswersEntry) -> str:
    return _turn(entry) if isinstance(entry, TurnEntry) else f"calls after {_turn(entry, -1)}"


def said_calls(calls: Sequence[Any]) -> str:
    """Calls in words."""
    each = [
        f"{call.name}({dict(call.arguments)})" if hasattr(call, "arguments") else f"{call.raw!r}"
        for call in calls
    ]
    return ", ".join(each)[:_SHOWN] or "no call"


def _outcome(trajectory: Trajectory) -> tuple[Outcome, str]:
    return trajectory.outcome, trajectory.reason


def ending(trajectory: Trajectory) -> str:
    """How a trajectory ended, in words."""
    cause = trajectory.cause
    said = "" if cause is None else f"{cause.type}: {cause.message}"
    why = ", ".join(each for each in (trajectory.reason, said) if each)
    return f"{trajectory.outcome.value}{why and f' ({why})'}"


def _is_own(trajectory: Trajectory) -> bool:
    """Whether the agent's own steps led to its end, and no clock, engine or caller."""
    is_cut = trajectory.outcome in (Outcome.DEADLINE, Outcome.CANCELLED)
    if is_cut or trajectory.limit_source == AGENT_TIMEOUT:
        return False
    return trajectory.outcome is not Outcome.FAILED or trajectory.reason == "agent"
