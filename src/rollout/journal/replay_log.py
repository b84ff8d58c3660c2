"""The log of a trajectory that runs again on its record alone, and where it departs from it."""

from __future__ import annotations

import zlib
from array import array
from typing import TYPE_CHECKING, Any

import anyio.lowlevel

from rollout.agents.turn_log import make_turn_question
from rollout.errors import RolloutError
from rollout.journal.records import Answer, ResultsRecord, TurnRecord
from rollout.journal.trajectory_log import RecordedAnswers, fill_generation, read_results
from rollout.limits import AGENT_TIMEOUT
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.agents.turn_log import Question
    from rollout.chat.trajectory import Trajectory
    from rollout.engine.pool.generation import Generation
    from rollout.medium import Media
    from rollout.token_prefix import TokenPrefix
    from rollout.tools.results import Answers
    from rollout.types import InvalidToolCall, ToolCall

    Calls = Sequence[ToolCall | InvalidToolCall]

#: Tokens that are shown of a context, from its end; characters of calls.
_TAIL, _SHOWN = 24, 300


class ReplayLog:
    """Answers from the record alone; a `TurnLog`.

    Args:
        answers: Turns and tool results, in order.
        recorded: The trajectory as it ended; None where it had not.
        restore: Gives a medium of the record its content.
        decode: Ids to text.
        parse_calls: Ids of a turn to its calls.
        on_step: Called with each question that is answered: its number, from 1, and what it is.
        on_departure: Called when the record has no answer, before the error of that is raised.

    Attributes:
        steps: How many questions were answered.
        departure: What was asked that the record has not, and what it has; "" while nothing was.
        is_beyond: The record ended before the agent, and nothing of the agent's had ended it.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        recorded: Trajectory | None,
        *,
        restore: Callable[[Media], Media],
        decode: Callable[[array[int]], str],
        parse_calls: Callable[[array[int]], Calls],
        on_step: Callable[[int, str], object],
        on_departure: Callable[[], object],
    ) -> None:
        self.steps = 0
        self.departure, self.is_beyond = "", False
        self._all, self._recorded = answers, recorded
        self.begin()  # a rejected prompt has no agent that would
        self._restore, self._decode, self._parse_calls = restore, decode, parse_calls
        self._on_step, self._on_departure = on_step, on_departure

    def begin(self) -> None:
        """Begin at the start of the agent."""
        self._answers = RecordedAnswers(self._all)

    async def recall_turn(
        self, prefix: TokenPrefix, seed: int, generation: Generation
    ) -> float | None:
        """See `TurnLog`.

        Raises:
            RolloutError: The record has no such turn.
        """
        await anyio.lowlevel.checkpoint()
        known = self._take(TurnRecord, make_turn_question(prefix, seed))
        if known is None:
            raise self._depart(f"asks the model after {self._show_context(prefix.ids)}")
        self._note_step(f"{_name_turn(known)}: {len(known.ids) // 4} tokens, {known.finish_reason}")
        return fill_generation(generation, known)

    async def recall_answers(self, question: Question, segment: str, calls: Calls) -> Answers:
        """See `TurnLog`.

        Raises:
            RolloutError: The record has no such calls.
        """
        known = self._take(ResultsRecord, question, segment)
        if known is None:
            raise self._depart(f"calls tools after {question[0]} tokens: {show_calls(calls)}")
        self._note_step(f"calls after {_name_turn(known, -1)}: {show_calls(calls)}")
        await anyio.lowlevel.checkpoint()
        return read_results(known, self._restore)

    async def wait_written(self) -> None:
        """See `TurnLog`."""

    def note_turn(self, *_: Any) -> bool:
        """See `TurnLog`; nothing is new here."""
        return False

    note_answers = note_turn

    def compare(self, trajectory: Trajectory) -> None:
        """Check that the record ends where the agent has ended, and in the same way."""
        recorded = self._recorded
        if self.departure or self.is_beyond:
            return
        if self._answers.left:
            self._depart(f"the agent ends here ({describe_end(trajectory)})")
        elif recorded is not None and _ended_itself(recorded):
            if (trajectory.outcome, trajectory.reason) != (recorded.outcome, recorded.reason):
                self._depart(f"ends as {describe_end(trajectory)}")
            elif _list_ids(trajectory) != _list_ids(recorded):
                self._depart("ends with other tokens")

    def _take(self, kind: type, question: Question, segment: str | None = None) -> Any:
        if self.departure or self.is_beyond:
            raise RolloutError(self.departure or "the record has ended")
        return self._answers.take(kind, question, segment)

    def _note_step(self, what: str) -> None:
        self.steps += 1
        self._on_step(self.steps, what)

    def _depart(self, question: str) -> RolloutError:
        recorded = self._recorded
        if self._answers.left or (recorded is not None and _ended_itself(recorded)):
            self.departure = f"{question}; the record has {self._show_next()}"
        else:
            self.is_beyond = True
        self._on_departure()
        return RolloutError(question)

    def _show_next(self) -> str:
        if not self._answers.left:
            return "ended" + (f" as {describe_end(self._recorded)}" if self._recorded else "")
        record = self._answers.left[0]
        length, digest, _ = record.question
        if isinstance(record, ResultsRecord):
            turn = record.segment, record.turn - 1
            turns = (each for each in self._all if isinstance(each, TurnRecord))
            ids = next((each.ids for each in turns if (each.segment, each.turn) == turn), b"")
            calls = show_calls(self._parse_calls(array("i", ids)))
            return f"calls after {_name_turn(record, -1)}: {calls}"
        for transcript in () if self._recorded is None else self._recorded.transcripts:
            packed = transcript.prefix.packed(0, length)
            if zlib.crc32(packed) == digest:
                return f"{_name_turn(record)} after {self._show_context(array('i', packed))}"
        return f"{_name_turn(record)} after {length} tokens"

    def _show_context(self, ids: array[int]) -> str:
        return f"{len(ids)} tokens, which end with {self._decode(ids[-_TAIL:])!r}"


def _name_turn(record: Answer, by: int = 0) -> str:
    return f"turn {record.turn + by + 1} of {record.segment}"


def _list_ids(trajectory: Trajectory) -> list[array[int]]:
    return [transcript.prefix.ids for transcript in trajectory.transcripts]


def show_calls(calls: Sequence[Any]) -> str:
    """Show calls on a line."""
    each = [
        f"{call.name}({dict(call.arguments)})" if hasattr(call, "arguments") else f"{call.raw!r}"
        for call in calls
    ]
    return ", ".join(each)[:_SHOWN] or "no call"


def describe_end(trajectory: Trajectory) -> str:
    """Say how a trajectory ended."""
    cause = trajectory.cause
    error = "" if cause is None else f"{cause.type}: {cause.message}"
    why = ", ".join(each for each in (trajectory.reason, error) if each)
    return f"{trajectory.outcome.value}{why and f' ({why})'}"


def _ended_itself(trajectory: Trajectory) -> bool:
    """Whether the agent's own steps led to its end, and no clock, engine or caller."""
    is_cut = trajectory.outcome in (Outcome.DEADLINE, Outcome.CANCELLED)
    if is_cut or trajectory.limit_source == AGENT_TIMEOUT:
        return False
    return trajectory.outcome is not Outcome.FAILED or trajectory.reason == "agent"
