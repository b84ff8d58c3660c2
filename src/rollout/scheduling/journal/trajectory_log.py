"""The journal of one trajectory: answers written as they come, and given again when it resumes."""

from __future__ import annotations

import logging
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import msgspec

from rollout.agents.turn_log import Place
from rollout.chat.media_records import contents_of
from rollout.errors import JournalError
from rollout.scheduling.journal.entries import (
    AnswersEntry,
    EndEntry,
    GivenAnswers,
    Key,
    TurnEntry,
)
from rollout.scheduling.journal.frames import most_bytes
from rollout.scheduling.journal.given_again import (
    answers_of,
    asked_of,
    fields_of,
    next_known,
    place_of_calls,
    place_of_turn,
    plain_states,
    recall_into,
    shown,
)
from rollout.scheduling.journal.journal_reading import Recorded, steps_of
from rollout.scheduling.journal.journal_writer import JournalWriter
from rollout.scheduling.journal.open_journal import OpenJournal
from rollout.scheduling.journal.packed_trajectory import packed_trajectory, trajectory_of
from rollout.scheduling.journal.told_rows import ALL, ToldRow
from rollout.scheduling.journal.unwritten import drop_large, drop_messages, fail_unwritten
from rollout.tools.results import show_something
from rollout.types import Outcome, format_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.agents.turn_log import AskedCalls
    from rollout.chat.trajectory import Trajectory
    from rollout.engine.pool.generation import Generation
    from rollout.token_prefix import TokenPrefix
    from rollout.tools import ToolResult
    from rollout.tools.answers import Answers, States
    from rollout.types import Prompt

logger = logging.getLogger("rollout.journal")

#: Reasons of cancelled trajectories that are not finished by it: the runtime was closed, a signal
#: ended `rollout run`, or a call had enough groups. A resumption continues them.
UNFINISHED = frozenset(("closed", "interrupted", "surplus"))

#: What there is of most trajectories.
NOTHING = Recorded()
_NONE: tuple[tuple[str, ...], dict[str, Any]] = (), {}


class TrajectoryLog(msgspec.Struct, eq=False):
    """Answers by what was asked: the same question after the same tokens gets the same answer.

    A resumed trajectory runs again from the start of its agent; while it asks what it asked before
    it is answered from here, in no time, and no engine and no tool is asked. The first question
    that is not known is a new one. So conversations that run side by side resume as well, and an
    agent that asks otherwise than before simply has fewer answers.

    Attributes:
        key: Which trajectory it is.
        recalled: Answers that were given again.
        has_answers: Whether there were any to give.
    """

    key: Key
    _journal: OpenJournal
    _writer: JournalWriter
    _recorded: Recorded = NOTHING
    _start: int = 0
    recalled: int = 0
    has_answers: bool = False
    _begun: bool = False
    _ticket: int = 0
    _latest: int = 0
    #: What was noted last, where answers may still become part of it.
    _turn: TurnEntry | None = None
    #: What its turns tell of its rows, by the identity of their ids; the one of the last turn.
    _rows: dict[int, ToldRow] = {}
    _row: ToldRow | None = None
    _next_row: int = 0
    _turns: dict[Place, deque[TurnEntry]] | None = None
    _answers: dict[Place, deque[AnswersEntry]] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the journal has it whole from before."""
        return self._recorded.end is not None

    @property
    def is_ended(self) -> bool:
        """Whether it was given its outcome in this process."""
        return self._ticket > 0

    @property
    def is_taken(self) -> bool:
        """Whether the caller had it before."""
        return self._recorded.delivered_in is not None

    def finished(self, prompt: Prompt, group: int) -> Trajectory | None:
        """The trajectory, where the journal has it.

        Raises:
            JournalError: It has it no more: the file was changed meanwhile.
        """
        if self._recorded.end is None:
            return None
        read = self._journal.read
        entry = read(self._recorded.end)
        assert isinstance(entry, EndEntry)
        _, rows = steps_of(self._recorded, read)
        reader = self._journal.reader_for(prompt)
        trajectory = trajectory_of(entry.trajectory, prompt, reader, rows)
        if any(transcript.media for transcript in trajectory.transcripts):
            self._journal.media.restore([trajectory])
        trajectory.group = group
        self._journal.counts.returned += 1
        return trajectory

    def begin(self) -> None:
        """An attempt begins at the start of its agent; the first has what is recorded."""
        recorded = self._recorded
        if self._begun or (recorded.stateful and recorded.is_begun):
            if not self._begun:
                tools = ", ".join(sorted(recorded.stateful))
                self._say_restart(f"the state of {tools} is lost, which nothing restores")
            self._begun, self._turns, self._answers = True, None, None
            self._rows, self._row, self._next_row = {}, None, 0
            self._turn, self.has_answers = None, False
            self._start += 1
            return
        self._begun = True
        if recorded.is_begun:
            self._journal.counts.continued += 1
            self._recall(recorded)

    def _recall(self, recorded: Recorded) -> None:
        """Have what is recorded ready to be given again."""
        turns: dict[Place, deque[TurnEntry]] = {}
        answers: dict[Place, deque[AnswersEntry]] = {}
        steps, rows = steps_of(recorded, self._journal.read)
        self._next_row = rows.next_number
        for entry in steps:
            if isinstance(entry, TurnEntry):
                turns.setdefault(entry.place, deque()).append(entry)
            else:
                answers.setdefault(entry.place, deque()).append(entry)
        self._turns, self._answers, self.has_answers = turns, answers, True

    def _say_restart(self, why: str) -> None:
        self._journal.counts.restarted += 1
        logger.info("%s starts from its beginning: %s", self.key, why)

    async def recall_turn(
        self, prefix: TokenPrefix, seed: int, generation: Generation
    ) -> float | None:
        """Fill a generation as it was; the seconds that it took, None where nothing is known."""
        await anyio.lowlevel.checkpoint()
        known = next_known(self._turns, place_of_turn(prefix, seed))
        if known is None:
            return None
        self._count()
        return recall_into(generation, known)

    def note_turn(
        self,
        prefix: TokenPrefix,
        seed: int,
        segment: str,
        turn: int,
        generation: Generation,
        seconds: float,
    ) -> bool:
        """A generation is over that continues `prefix`; whether to wait for `room`."""
        ids, log_probs = generation.packed()
        row, pieces, kept = self._row, prefix.pieces, ALL
        if row is None or row.prefix is not prefix:
            row = self._row_of(prefix)
        # In place: between two turns of a trajectory thousands of other ones run, so that each call
        # of a function finds its code in no cache and costs more than what it does.
        told = row.told
        if told and (told > len(pieces) or pieces[told - 1] is not row.last):
            told, kept = row.untold()
        row.told, row.last = len(pieces) + (1 if ids else 0), ids
        row.turns += 1
        writer = self._writer
        self._turn = entry = TurnEntry(
            self.key,
            self._start,
            segment,
            turn,
            seed,
            row.number,
            kept,
            pieces[told:],
            ids,
            log_probs,
            generation.versions,
            generation.finish_reason,
            generation.cached_tokens,
            generation.resumes,
            seconds,
        )
        if generation.top_count:
            entry.top = (generation.top_count, generation.top_ids, generation.top_log_probs)
        if generation.expert_shape is None:
            self._latest = number = writer.put(entry)
        else:
            shape, experts = generation.expert_shape, generation.routed_experts
            entry.experts = (*shape, generation.expert_room, experts)
            self._latest = number = writer.put_large(entry)
        return number > writer.admitted

    def _row_of(self, prefix: TokenPrefix) -> ToldRow:
        row = self._rows.get(id(prefix))
        if row is None:
            row = self._rows[id(prefix)] = ToldRow(prefix, self._next_row)
            self._next_row += 1
        self._row = row
        return row

    #: As in `TurnLog`.
    asked = staticmethod(asked_of)

    async def recall_answers(self, asked: AskedCalls, segment: str) -> Answers | None:
        """What was answered then; None where nothing is known."""
        await anyio.lowlevel.checkpoint()
        known = next_known(self._answers, place_of_calls(asked), segment)
        if known is None:
            return None
        self._count()
        return answers_of(known, self._journal.media.whole)

    def note_answers(
        self,
        asked: AskedCalls,
        segment: str,
        turn: int,
        results: Sequence[ToolResult],
        seconds: float,
        states: States | None,
    ) -> bool:
        """Calls have been answered; whether to wait for `room`.

        What holds no plain data is not written, and asked again. As a rule the record of the turn
        is not on its way to the file yet, and these become part of it.
        """
        try:
            fields, are_texts = fields_of(results)
            stateful, snapshots = _NONE if states is None else (states[0], plain_states(states[1]))
        except JournalError as error:
            self._journal.say_unwritable(error)
            return False
        writer, pieces, last, self._turn = self._writer, asked.prefix.pieces, self._turn, None
        if not are_texts and show_something(results):
            # Their contents come first.
            for result in results:
                self._journal.put_media({m.digest: m.content for m in chain(*shown(result))})
        elif last is not None and pieces and pieces[-1] is last.ids:  # else the calls came later
            given = GivenAnswers(asked.calls, fields, seconds, stateful, snapshots)
            # A lock would cost a microsecond. The thread seals first and then looks whether this
            # amends, and this the other way round: the second of them sees the first.
            writer.is_amending = True
            try:
                if self._latest > writer.sealed:
                    last.answers = given
                    return False
            finally:
                writer.is_amending = False
        place = place_of_calls(asked)
        entry = AnswersEntry(
            self.key, self._start, segment, turn, place, fields, seconds, stateful, snapshots
        )
        self._latest = number = writer.put(entry)
        return number > writer.admitted

    async def room(self) -> None:
        """Until the journal takes more."""
        await self._journal.room(self._latest)

    async def kept(self) -> None:
        """Until what was noted last is written."""
        await self._journal.kept(self._latest)

    def end(self, trajectory: Trajectory) -> None:
        """It has its outcome. One that holds what cannot be written fails by that."""
        if trajectory.outcome is Outcome.CANCELLED and trajectory.reason in UNFINISHED:
            return
        for segment in trajectory.segments:
            if segment.transcript.media:
                self._journal.put_media(contents_of([trajectory]))
                break
        if self.has_answers:
            self._say_departure()
        self._turn = None
        self._ticket = self._journal.put(EndEntry(self.key, self._packed(trajectory)))

    def _packed(self, trajectory: Trajectory) -> bytes:
        journal = self._journal
        schemas, unwritable = journal.reader_of(trajectory.prompt).schemas, journal.unwritable
        told, self._rows, self._row = self._rows, {}, None
        try:
            packed, fault = packed_trajectory(trajectory, schemas, unwritable, told)
            if fault is None:
                if len(packed) <= most_bytes():
                    return packed
                fault = drop_large(trajectory, len(packed))
        except (JournalError, TypeError, ValueError, OverflowError, RecursionError) as error:
            fault = error if isinstance(error, JournalError) else JournalError(format_error(error))
            drop_messages(trajectory)
        fail_unwritten(trajectory, fault)
        packed, _ = packed_trajectory(trajectory, schemas, unwritable, {})
        return packed

    def _say_departure(self) -> None:
        left = sum(len(each) for each in (self._turns or {}).values())
        left += sum(len(each) for each in (self._answers or {}).values())
        self._turns = self._answers = None
        if left:
            self._journal.counts.departed += 1
            logger.warning(
                "%s asked otherwise than before it was resumed: %d of its recorded answers were of "
                "no use, and it continued after the %d before them",
                self.key,
                left,
                self.recalled,
            )

    @property
    def failure(self) -> JournalError:
        """Why its end cannot be written."""
        return self._journal.failure or JournalError("the journal cannot be written")

    async def until_written(self, deadline: float, is_over: Callable[[], bool]) -> bool:
        """Whether its end is written.

        Args:
            deadline: Up to when that is waited for where the disk refuses it.
            is_over: Whether nobody waits any more.
        """
        ticket = self._ticket
        return not ticket or await self._journal.until_written(ticket, deadline, is_over)

    def delivered(self) -> None:
        """The caller has it."""
        self._journal.delivered([] if self.is_taken else [self.key])

    def _count(self) -> None:
        self.recalled += 1
        self._journal.counts.recalled += 1
