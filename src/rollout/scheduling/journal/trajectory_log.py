"""The journal of one trajectory: answers written as they come, and given again when it resumes."""

from __future__ import annotations

import logging
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from rollout.chat.media_records import contents_of
from rollout.errors import JournalError
from rollout.scheduling.journal.entries import AnswersEntry, EndEntry, Key, TurnEntry
from rollout.scheduling.journal.given_again import (
    answers_of,
    fields_of,
    place_of_calls,
    place_of_turn,
    plain_states,
    recall_into,
    shown,
)
from rollout.scheduling.journal.journal_reading import Recorded, turn_reader
from rollout.scheduling.journal.packed_trajectory import packed_trajectory, trajectory_of
from rollout.scheduling.journal.plain_data import plain
from rollout.tools.results import show_something
from rollout.types import Cause, Outcome, said

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.agents.turn_log import Place
    from rollout.chat.trajectory import Trajectory
    from rollout.engine.core import SamplingParams
    from rollout.engine.driver.generation import Generation
    from rollout.scheduling.journal.open_journal import OpenJournal
    from rollout.token_prefix import TokenPrefix
    from rollout.tools.answers import Answers
    from rollout.types import Prompt

logger = logging.getLogger("rollout.journal")

#: Reasons of cancelled trajectories that are not finished by it: the runtime was closed, a signal
#: ended `rollout run`, or a call had enough groups. A resumption continues them.
UNFINISHED = frozenset(("closed", "interrupted", "surplus"))
#: Reason of a trajectory that holds what cannot be written.
UNWRITABLE = "journal"


_NOTHING = Recorded()


class TrajectoryLog:
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

    __slots__ = (
        "_answers",
        "_begun",
        "_journal",
        "_latest",
        "_noted",
        "_recorded",
        "_start",
        "_ticket",
        "_turns",
        "has_answers",
        "key",
        "recalled",
    )

    def __init__(self, journal: OpenJournal, key: Key, recorded: Recorded | None) -> None:
        self.key = key
        self.recalled = 0
        self.has_answers = False
        self._journal = journal
        self._recorded = recorded or _NOTHING
        self._start = self._recorded.start
        self._ticket = self._latest = 0
        self._begun = False
        #: Ids and log-probs of the turns that are written, in order.
        self._noted: list[tuple[bytes, bytes]] = []
        self._turns: dict[Place, deque[TurnEntry]] | None = None
        self._answers: dict[Place, deque[AnswersEntry]] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the journal has it whole from before."""
        return self._recorded.end is not None

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
        reader, known = self._journal.reader_for(prompt), turn_reader(self._recorded, read)
        trajectory = trajectory_of(entry.trajectory, prompt, reader, known)
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
                self._say_restart()
            self._begun, self._turns, self._answers = True, None, None
            self._noted, self.has_answers = [], False
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
        for entry in map(self._journal.read, recorded.turns):
            assert isinstance(entry, TurnEntry)
            turns.setdefault(entry.place, deque()).append(entry)
            self._noted.append((entry.ids, entry.log_probs))
        for entry in map(self._journal.read, recorded.answers):
            assert isinstance(entry, AnswersEntry)
            answers.setdefault(entry.place, deque()).append(entry)
        self._turns, self._answers, self.has_answers = turns, answers, True

    def _say_restart(self) -> None:
        self._journal.counts.restarted += 1
        logger.info(
            "%s starts from its beginning: the state of %s is lost, which has no snapshot()",
            self.key,
            ", ".join(sorted(self._recorded.stateful)),
        )

    async def recall_turn(
        self, prefix: TokenPrefix, sampling: SamplingParams, generation: Generation
    ) -> float | None:
        """Fill a generation as it was; the seconds that it took, None where nothing is known."""
        await anyio.lowlevel.checkpoint()
        known = _next(self._turns, place_of_turn(prefix, sampling))
        if known is None:
            return None
        self._count()
        return recall_into(generation, known)

    def note_turn(
        self,
        prefix: TokenPrefix,
        sampling: SamplingParams,
        segment: str,
        turn: int,
        generation: Generation,
        seconds: float,
    ) -> bool:
        """A generation is over that continues `prefix`; whether to wait for `room`."""
        top, experts, shape = None, None, generation.expert_shape
        packed = ids, log_probs = generation.packed()
        self._noted.append(packed)
        if generation.top_count:
            top = (generation.top_count, generation.top_ids, generation.top_log_probs)
        if shape is not None:
            experts = (*shape, generation.expert_room, generation.routed_experts)
        return self._put(
            TurnEntry(
                self.key,
                self._start,
                segment,
                turn,
                place_of_turn(prefix, sampling),
                ids,
                log_probs,
                generation.versions,
                generation.finish_reason,
                generation.cached_tokens,
                generation.resumes,
                seconds,
                top,
                experts,
            )
        )

    #: As in `TurnLog`.
    place_of_calls = staticmethod(place_of_calls)

    async def recall_answers(self, place: Place) -> Answers | None:
        """What was answered then; None where nothing is known."""
        await anyio.lowlevel.checkpoint()
        known = _next(self._answers, place)
        if known is None:
            return None
        self._count()
        return answers_of(known, self._journal.media.whole)

    def note_answers(self, place: Place, segment: str, turn: int, answers: Answers) -> bool:
        """Calls have been answered; whether to wait for `room`.

        What holds no plain data is not written, and asked again.
        """
        try:
            results = [fields_of(each, at) for at, each in enumerate(answers.results)]
            snapshots = plain_states(answers.snapshots) if answers.snapshots else {}
            if show_something(answers.results):
                for result in answers.results:
                    self._journal.put_media({m.digest: m.content for m in chain(*shown(result))})
            return self._put(
                AnswersEntry(
                    self.key,
                    self._start,
                    segment,
                    turn,
                    place,
                    results,
                    answers.seconds,
                    [*answers.stateful],
                    snapshots,
                )
            )
        except (JournalError, TypeError, ValueError, OverflowError) as error:
            self._journal.say_unwritable(error)
            return False

    def _put(self, entry: TurnEntry | AnswersEntry) -> bool:
        self._latest = number = self._journal.put(entry)
        return number > self._journal.taken

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
        if any(segment.transcript.media for segment in trajectory.segments):
            self._journal.put_media(contents_of([trajectory]))
        self._say_departure()
        self._ticket = self._journal.put(EndEntry(self.key, self._packed(trajectory)))

    def _packed(self, trajectory: Trajectory) -> bytes:
        schemas, unwritable = self._journal.schemas_for(trajectory.prompt), self._journal.unwritable
        known = {id(piece): number for number, each in enumerate(self._noted) for piece in each}
        self._noted = []
        try:
            packed, fault = packed_trajectory(trajectory, schemas, unwritable, known)
            if fault is None:
                return packed
        except (JournalError, TypeError, ValueError, OverflowError) as error:
            fault = error if isinstance(error, JournalError) else JournalError(said(error))
            _drop_messages(trajectory)
        _fail(trajectory, fault)
        packed, _ = packed_trajectory(trajectory, schemas, unwritable, {})
        return packed

    def _say_departure(self) -> None:
        if not self.has_answers:
            return
        left = sum(len(each) for each in (self._turns or {}).values())
        left += sum(len(each) for each in (self._answers or {}).values())
        self._turns = self._answers = None
        if left:
            self._journal.counts.departed += 1
            logger.warning(
                "%s asked otherwise than before it was resumed: %d of its recorded answers were of "
                "no use, and it went on from the %d before them",
                self.key,
                left,
                self.recalled,
            )

    @property
    def failure(self) -> JournalError:
        """Why its end cannot be written."""
        return self._journal.failure or JournalError("the journal cannot be written")

    @property
    def is_written(self) -> bool:
        """Whether its end is; where it is not, who listens to the journal is called when it may."""
        self._journal.ask()
        return self._journal.has_written(self._ticket)

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
        self._journal.delivered([self.key])

    def _count(self) -> None:
        self.recalled += 1
        self._journal.counts.recalled += 1


def _next(known: dict[Place, deque[Any]] | None, place: Place) -> Any:
    """The next answer there; each is given once."""
    found = known.get(place) if known else None
    if not found or known is None:
        return None
    entry = found.popleft()
    if not found:
        del known[place]
    return entry


def _fail(trajectory: Trajectory, fault: JournalError) -> None:
    """It fails, and what of it cannot be written is gone from it."""
    trajectory.outcome, trajectory.reason = Outcome.FAILED, UNWRITABLE
    trajectory.limit_source, trajectory.cause = None, Cause.of(fault)
    trajectory.trainable, trajectory.reward = False, None
    for segment in trajectory.segments:
        segment.reward = segment.token_rewards = None
    trajectory.extra = {
        key: value for key, value in trajectory.extra.items() if _is_plain(key, value)
    }


def _drop_messages(trajectory: Trajectory) -> None:
    """What they hold cannot be written at all."""
    trajectory.messages = []
    for segment in trajectory.segments:
        segment.messages = []
    trajectory.turn_scores, trajectory.tool_rewards = [], []


def _is_plain(key: Any, value: Any) -> bool:
    try:
        plain({key: value}, "extra")
    except JournalError:
        return False
    return True
