"""The journal of one trajectory: answers are written as they come, and reused on resume."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import msgspec

from rollout.agents.turn_log import make_turn_question
from rollout.chat.trajectory_codec import collect_contents, restore_media
from rollout.journal.index import RecordedTrajectory
from rollout.journal.journal import Journal
from rollout.journal.log_file import logger
from rollout.journal.records import Answer, Key, ResultsRecord, TurnRecord
from rollout.journal.values import REFUSE, UNENCODABLE, pack_end
from rollout.media.records import drop_content
from rollout.medium import Media
from rollout.tools import ToolResult
from rollout.tools.results import Answers
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rollout.agents.turn_log import Question, TurnId
    from rollout.chat.trajectory import Trajectory
    from rollout.engine.pool.generation import Generation
    from rollout.token_prefix import TokenPrefix
    from rollout.types import Prompt

#: Reasons of cancelled trajectories that are not finished by it: the runtime was closed, a signal
#: ended `rollout run`, or a call had enough groups. A resumption continues them.
UNFINISHED = frozenset(("closed", "interrupted", "surplus"))


class RecordedAnswers:
    """Turns and tool results by their questions; each is used once, and `left` has the rest."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        self.left = list(answers)

    def take(self, kind: type, question: Question, segment: str | None = None) -> Any:
        """Take the next answer to a question, of this segment where there is one; None: none."""
        known = [each for each in self.left if type(each) is kind and each.question == question]
        first = known[0] if known else None
        answer = next((each for each in known if each.segment == segment), first)
        self.left = [each for each in self.left if each is not answer]
        return answer


class TrajectoryLog(msgspec.Struct, eq=False):
    """Answers by what was asked: the same question after the same tokens gets the same answer.

    A resumed trajectory runs again from the start of its agent. Each question that it asked before
    is answered from the journal, without an engine or a tool; the first one that is not known is a
    new one. So conversations side by side resume in any order, and an agent that asks otherwise
    than before has fewer answers.

    Attributes:
        key: Which trajectory it is.
        recorded: What earlier processes recorded of it.
        recalled: How many answers were reused.
        number: Of the record of its end in this process; 0 where it has not ended.
    """

    key: Key
    recorded: RecordedTrajectory
    _journal: Journal
    recalled: int = 0
    number: int = 0
    _start: int | None = None
    _latest: int = 0
    _answers: RecordedAnswers | None = None

    def read_end(self, prompt: Prompt, group: int) -> Trajectory | None:
        """Read the trajectory, where the journal has it finished.

        Args:
            group: Its number in the call.
        """
        index, decode = self._journal.index, self._journal.services.template.decode
        trajectory = index.read_end(self.key, self.recorded, prompt, decode)
        if trajectory is not None:
            if any(transcript.media for transcript in trajectory.transcripts):
                restore_media(trajectory, index.contents)
            trajectory.group = group
            self._journal.counts["returned"] += 1
        return trajectory

    def begin(self) -> None:
        """Begin an attempt from the start of the agent; the first one has what is recorded."""
        recorded, counts = self.recorded, self._journal.counts
        is_first = self._start is None
        self._start = recorded.start if self._start is None else self._start + 1
        self._answers = None
        if not (is_first and recorded.answers):
            return
        if recorded.stateful:
            counts["restarted"] += 1
            self._start += 1
            tools = ", ".join(sorted(recorded.stateful))
            logger.info("%s starts from its beginning: the state of %s is lost", self.key, tools)
            return
        counts["continued"] += 1
        self._answers = RecordedAnswers(map(self._journal.index.read, recorded.answers))

    async def wait_written(self) -> None:
        """See `TurnLog`."""
        await self._journal.file.wait_written(self._latest)

    async def recall_turn(
        self, prefix: TokenPrefix, seed: int, generation: Generation
    ) -> float | None:
        """See `TurnLog`."""
        if self._answers is None:
            return None
        await anyio.lowlevel.checkpoint()
        known = self._take(TurnRecord, make_turn_question(prefix, seed))
        return None if known is None else fill_generation(generation, known)

    def _take(self, kind: type, question: Question, segment: str | None = None) -> Any:
        known = None if self._answers is None else self._answers.take(kind, question, segment)
        if known is not None:
            self.recalled += 1
            self._journal.counts["recalled"] += 1
        return known

    def note_turn(
        self, prefix: TokenPrefix, seed: int, turn: TurnId, generation: Generation, seconds: float
    ) -> bool:
        """See `TurnLog`."""
        record = TurnRecord(
            self.key,
            self._start or 0,
            *turn,
            make_turn_question(prefix, seed),
            *generation.packed(),
            generation.versions,
            generation.finish_reason,
            generation.cached_tokens,
            generation.resumes,
            seconds,
        )
        if generation.top_count:
            top_ids, top_log_probs = bytes(generation.top_ids), bytes(generation.top_log_probs)
            record.top = (generation.top_count, top_ids, top_log_probs)
        if generation.expert_shape is not None:
            shape, experts = generation.expert_shape, bytes(generation.routed_experts)
            record.experts = (*shape, generation.expert_room, experts)
        self._latest = self._journal.file.put(record)
        return self._journal.waits

    async def recall_answers(
        self, question: Question, segment: str, calls: Sequence[Any]
    ) -> Answers | None:
        """See `TurnLog`."""
        if self._answers is None:
            return None
        await anyio.lowlevel.checkpoint()
        known = self._take(ResultsRecord, question, segment)
        restore = self._journal.index.contents.restore
        return None if known is None else read_results(known, restore)

    def note_answers(
        self, question: Question, turn: TurnId, answers: Answers, stateful: Sequence[str]
    ) -> bool:
        """See `TurnLog`. Results that cannot be written are left out: their tools run again."""
        try:
            packed = [_pack_result(each, at) for at, each in enumerate(answers.results)]
            for medium in chain.from_iterable((*r.images, *r.videos) for r in answers.results):
                self._journal.put_media({medium.digest: medium.content})
            where = self.key, self._start or 0, *turn, question
            record = ResultsRecord(*where, packed, answers.seconds, stateful)
            self._latest = self._journal.file.put(record)
        except UNENCODABLE as error:
            what = "it is not in the journal, and a resumed trajectory calls the tool again"
            self._journal.warn_once(f"{error}: {what}")
            return False
        return self._journal.waits

    def pack_end(self, trajectory: Trajectory) -> bytes | None:
        """Pack a trajectory that has its outcome; None where a resumption is to continue it.

        One that holds what cannot be written fails by that.
        """
        if trajectory.outcome is Outcome.CANCELLED and trajectory.reason in UNFINISHED:
            return None
        self._journal.put_media(collect_contents([trajectory]))
        if self._answers is not None and self._answers.left:
            self._journal.counts["departed"] += 1
            logger.warning(
                "%s asked otherwise than before it was resumed: %d of its recorded answers were of "
                "no use, and it continued after the %d before them",
                self.key,
                len(self._answers.left),
                self.recalled,
            )
        self._answers = None
        return pack_end(trajectory, self._journal.values)


def fill_generation(generation: Generation, known: TurnRecord) -> float:
    """Fill a generation as it was; return the seconds that it took."""
    generation.cached_tokens, generation.resumes = known.cached_tokens, known.resumes
    if known.top is not None:
        generation.top_count, generation.top_ids, generation.top_log_probs = known.top
    if known.experts is not None:
        layers, top_k, generation.expert_room, generation.routed_experts = known.experts
        generation.expert_shape = (layers, top_k)
    finish: Any = known.finish_reason
    generation.recall(known.ids, known.log_probs, known.versions, finish)
    return known.seconds


_RESULT_FIELDS = ("data", "reward", "metrics", "is_error", "end_trajectory", "extra")


def _pack_result(result: ToolResult, at: int) -> str | dict[str, Any]:
    text: str = REFUSE.write(str.__str__(result.text), f"answers[{at}].text")
    if result.data is None and result == ToolResult(result.text):
        return text
    values = {n: REFUSE.write(getattr(result, n), f"answers[{at}].{n}") for n in _RESULT_FIELDS}
    media = {n: [drop_content(m) for m in getattr(result, n)] for n in ("images", "videos")}
    return {"text": text, **values, **media}


def read_results(known: ResultsRecord, restore: Callable[[Media], Media]) -> Answers:
    """Read what tools answered.

    Args:
        restore: Gives a medium its content.
    """
    results = []
    for each in known.results:
        fields: dict[str, Any] = {"text": each} if isinstance(each, str) else dict(each)
        for kind in fields.keys() & {"images", "videos"}:
            fields[kind] = [restore(msgspec.convert(medium, Media)) for medium in fields[kind]]
        results.append(ToolResult(**fields))
    return Answers(results, known.seconds)
