"""What a journal holds: one pass over the file finds its records, which are read where needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import msgspec

from rollout.errors import JournalError
from rollout.journal import records as kinds
from rollout.journal.log_file import HEAD, MAGIC, logger, read_frames
from rollout.journal.records import Key, Record, Span, decode_record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    ReadRecord = Callable[[Span], Record]


class PromptKey(NamedTuple):
    """Identifies a prompt of a call, and its group."""

    step: int
    uid: str
    validate: bool
    call: int


def get_prompt_key(key: Key) -> PromptKey:
    """Return the prompt of a trajectory."""
    return PromptKey(key.step, key.uid, key.validate, key.call)


@attrs.define(eq=False)
class RecordedTrajectory:
    """Where the records of one trajectory are.

    Attributes:
        start: How often it had begun again.
        turns, results: Turns, and results of tools, since its last beginning, in order.
        stateful: Tools called since then that keep a state.
        end: The record of its end; None where it is not finished.
        is_delivered: Whether a caller has it.
        version: The oldest weights that sampled for it since its last beginning.
    """

    start: int = 0
    turns: list[Span] = attrs.field(factory=list)
    results: list[Span] = attrs.field(factory=list)
    stateful: set[str] = attrs.field(factory=set)
    end: Span | None = None
    is_delivered: bool = False
    version: int | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to resume it from."""
        return bool(self.turns or self.results)

    def restart(self, start: int) -> None:
        """Forget what was before a later beginning."""
        if start > self.start:
            self.start, self.version = start, None
            self.turns, self.results, self.stateful = [], [], set()


@attrs.define(eq=False)
class RecordedPull:
    """What became of a prompt that was pulled.

    Attributes:
        span: Of its `PullRecord`.
        group: Under which its members began last; None where they did not.
        is_dropped: Whether nobody will get its group.
    """

    number: int
    step: int
    digest: bytes
    span: Span
    group: PromptKey | None = None
    is_dropped: bool = False


class JournalIndex:
    """What a journal holds.

    Attributes:
        header: None where a death cut it short; there is nothing else then.
        version: The weights that the engines had last.
        prompts: The records that have the fields of prompts.
        pulls: By number.
        trajectories: In the order of their first records.
        delivered: By the step of the call that delivered them, its groups in order.
        missing: By step, how many groups fewer a `collect` returned.
        media: Contents of images and videos, by digest.
        size: Bytes of its whole frames.
        torn_size: Bytes that follow them.
    """

    def __init__(self) -> None:
        self.header: kinds.Header | None = None
        self.version: int | None = None
        self.prompts: dict[PromptKey, Span] = {}
        self.pulls: dict[int, RecordedPull] = {}
        self.trajectories: dict[Key, RecordedTrajectory] = {}
        self.delivered: dict[int, list[PromptKey]] = {}
        self.missing: dict[int, int] = {}
        self.media: dict[str, Span] = {}
        self.size = self.torn_size = 0

    def add(self, span: Span, record: Record) -> None:
        """Note the next record."""
        match record:
            case kinds.Header():
                self.header = record
            case kinds.PromptRecord():
                key = PromptKey(record.step, record.uid, record.validate, record.call)
                self.prompts[key] = span
            case kinds.PullRecord():
                pull = RecordedPull(record.number, record.step, record.digest, span)
                self.pulls[record.number] = pull
            case kinds.GroupRecord():
                key = PromptKey(record.step, record.uid, False, record.call)
                self.pulls[record.number].group = key
                self.prompts[key] = self.pulls[record.number].span
            case kinds.DroppedRecord():
                self.pulls[record.number].is_dropped = True
            case kinds.TurnRecord():
                recorded = self._get(record.key)
                recorded.restart(record.start)
                recorded.turns.append(span)
                versions = [version for version, _ in record.versions]
                recorded.version = find_oldest(recorded.version, *versions)
            case kinds.ResultsRecord():
                recorded = self._get(record.key)
                recorded.restart(record.start)
                recorded.results.append(span)
                recorded.stateful.update(record.stateful)
            case kinds.EndRecord():
                for each, _ in record.ends:
                    self._get(each).end = span
            case kinds.DeliveredRecord():
                for each in record.keys:
                    self._get(each).is_delivered = True
                if record.step is not None:
                    groups = self.delivered.setdefault(record.step, [])
                    groups += dict.fromkeys(map(get_prompt_key, record.keys))
            case kinds.ShortRecord():
                self.missing[record.step] = record.missing
            case kinds.VersionRecord():
                self.version = record.version
            case kinds.MediumRecord():
                self.media[record.digest] = span

    def _get(self, key: Key) -> RecordedTrajectory:
        return self.trajectories.setdefault(key, RecordedTrajectory())

    def warn_of_tail(self, path: Path, what: str) -> None:
        """Say what becomes of the bytes that follow the whole frames, if there are any."""
        if self.torn_size:
            logger.warning(
                "%s: its last %d bytes, from byte %d on, hold no whole record and are %s: what "
                "wrote it was ended meanwhile",
                path,
                self.torn_size,
                self.size,
                what,
            )


def find_oldest(*versions: int | None) -> int | None:
    """Return the oldest of the versions that are known; None where none is."""
    return min((each for each in versions if each is not None), default=None)


def read_journal(path: Path) -> JournalIndex:
    """Index a journal; a torn tail is left out.

    Raises:
        JournalError: It cannot be read, is no journal, or is damaged; names the byte.
    """
    index = JournalIndex()
    for start, payload in read_frames(path):
        if payload is None:
            index.torn_size = path.stat().st_size - start
            break
        span = Span(start + HEAD.size, len(payload))
        try:
            index.add(span, decode_record(payload))
        except (msgspec.MsgspecError, LookupError) as error:
            raise JournalError(f"{path}: the record at byte {start}: {error}") from error
        index.size = span.start + span.size
    if not (index.size or index.torn_size) and path.stat().st_size:
        index.size = len(MAGIC)
    return index


def make_reader(path: Path) -> ReadRecord:
    """Make a function that reads single records of a journal."""

    def read(span: Span) -> Record:
        with path.open("rb") as file:
            file.seek(span.start)
            return decode_record(file.read(span.size))

    return read


class RecordedMedia:
    """Contents of images and videos by their digests, read where they are wanted."""

    def __init__(self, spans: Mapping[str, Span], read: ReadRecord) -> None:
        self._spans, self._read = spans, read

    def get(self, digest: str, /) -> bytes | None:
        """Read a content; None where the journal has none."""
        span = self._spans.get(digest)
        if span is None:
            return None
        record = self._read(span)
        assert isinstance(record, kinds.MediumRecord)
        return record.content


def read_steps(
    recorded: RecordedTrajectory, read: ReadRecord
) -> list[kinds.TurnRecord | kinds.ResultsRecord]:
    """Read the turns and tool results of a trajectory, in order."""
    steps: Any = map(read, sorted([*recorded.turns, *recorded.results]))
    return list(steps)
