"""What a journal holds: one pass over the file finds its records, which are read where needed."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.config import config_from_dict
from rollout.engine.pool.model_template import load_model_template
from rollout.errors import JournalError
from rollout.journal import records as kinds
from rollout.journal.log_file import HEAD, MAGIC_PREFIX, logger, read_frames
from rollout.journal.records import Answer, GroupKey, Key, Record, Span, decode_record
from rollout.journal.values import hash_prompt, read_prompt, unpack_end
from rollout.media.records import KnownContents
from rollout.scheduling.members import SourceCallKey

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from rollout.chat import ChatTemplate
    from rollout.chat.trajectory import Trajectory
    from rollout.types import Prompt

    Decode = Callable[[Sequence[int]], str]


@attrs.define(eq=False)
class RecordedTrajectory:
    """Where the records of one trajectory are.

    Attributes:
        start: How often it had begun again.
        answers: Turns, and results of tools, since its last beginning, in order.
        stateful: Tools called since then that keep a state.
        version: The oldest weights that sampled for it since then; None: none did.
        end: The record of its end; None where it is not finished.
        is_delivered: Whether a caller has it.
    """

    start: int = 0
    answers: list[Span] = attrs.field(factory=list)
    stateful: set[str] = attrs.field(factory=set)
    version: int | None = None
    end: Span | None = None
    is_delivered: bool = False

    def add(self, span: Span, record: Answer) -> None:
        """Note the next answer; one of a later beginning replaces what was before."""
        if record.start > self.start:
            self.start, self.version = record.start, None
            self.answers, self.stateful = [], set()
        self.answers.append(span)
        if isinstance(record, kinds.ResultsRecord):
            self.stateful.update(record.stateful)
        elif isinstance(record, kinds.TurnRecord):
            self.version = find_oldest(self.version, *(version for version, _ in record.versions))


@attrs.define(eq=False)
class RecordedPull:
    """What became of a prompt that was pulled.

    Attributes:
        number: Its number among all prompts that the run pulled.
        pulled_in: The call that pulled it last.
        span: Of its `PullRecord`.
        group: As which its members began last; None where they did not.
        delivered_in: The last call that delivered its group; None: none did.
        is_dropped: Whether nobody will get its group.
    """

    number: int
    pulled_in: SourceCallKey
    span: Span
    group: GroupKey | None = None
    delivered_in: SourceCallKey | None = None
    is_dropped: bool = False


class JournalIndex:
    """What a journal holds.

    Attributes:
        header: None where a death cut it short; there is nothing else then.
        version: The weights that the engines had last.
        prompts: The records that have the fields of prompts.
        pulls: By number.
        repeats: By `hash_prompt`: what was pulled, and is not pulled again yet.
        groups: The pulls of groups that have begun; those that were delivered in that order.
        trajectories: In the order of their first records.
        missing: How many groups fewer a `collect` returned without an error.
        media: Contents of images and videos, by digest.
        contents: Gives images and videos these.
        size: Bytes of its complete frames.
        torn_size: Bytes that follow them.
    """

    def __init__(self, path: Path) -> None:
        self.header: kinds.Header | None = None
        self.version: int | None = None
        self.prompts: dict[GroupKey, Span] = {}
        self.pulls: dict[int, RecordedPull] = {}
        self.repeats: dict[bytes, list[RecordedPull]] = {}
        self.groups: dict[GroupKey, RecordedPull] = {}
        self.trajectories: dict[Key, RecordedTrajectory] = {}
        self.missing: dict[SourceCallKey | None, int] = {}
        self.media: dict[str, Span] = {}
        self.contents = KnownContents(self.get, str(path))
        self.size = self.torn_size = 0
        self._path = path.absolute()
        self._template: ChatTemplate | None = None

    def add(self, span: Span, record: Record) -> None:
        """Note the next record."""
        match record:
            case kinds.Header():
                self.header = record
            case kinds.PromptRecord():
                self.prompts[record.group] = span
            case kinds.PullRecord():
                pull = RecordedPull(record.number, record.pulled_in, span)
                self.pulls[record.number] = pull
                self.repeats.setdefault(hash_prompt(record.fields), []).append(pull)
            case kinds.GroupRecord():
                pull = self.pulls[record.number]
                pull.group = record.group
                self.groups[record.group], self.prompts[record.group] = pull, pull.span
            case kinds.DroppedRecord():
                self.pulls[record.number].is_dropped = True
            case kinds.TurnRecord() | kinds.ResultsRecord():
                self._get(record.key).add(span, record)
            case kinds.EndRecord():
                for key, _ in record.ends:
                    self._get(key).end = span
            case kinds.DeliveredRecord():
                self._add_delivery(record)
            case kinds.VersionRecord():
                self.version = record.version
            case kinds.MediumRecord():
                self.media[record.digest] = span

    def _add_delivery(self, record: kinds.DeliveredRecord) -> None:
        call = record.delivered_in
        for key in record.keys:
            self._get(key).is_delivered = True
            pull = self.groups.get(key.group)
            if call is not None and pull is not None:
                pull.delivered_in = call
                self.groups[key.group] = self.groups.pop(key.group)  # now the last
        if call is not None and record.missing:
            self.missing[call] = record.missing

    def _get(self, key: Key) -> RecordedTrajectory:
        return self.trajectories.setdefault(key, RecordedTrajectory())

    def warn_of_tail(self, what: str) -> None:
        """Say what becomes of the bytes that follow the complete frames, if there are any."""
        if self.torn_size:
            tail = f"its last {self.torn_size} bytes, from byte {self.size} on, hold no whole"
            why = "what wrote it was ended meanwhile"
            logger.warning("%s: %s record and are %s: %s", self._path, tail, what, why)

    # Reading records.

    def read(self, span: Span) -> Any:
        """Read a record; in any thread."""
        with self._path.open("rb") as file:
            file.seek(span.start)
            return decode_record(file.read(span.size))

    def get(self, digest: str, /) -> bytes | None:
        """Read the content of an image or video; None where the journal has none."""
        span = self.media.get(digest)
        return None if span is None else self.read(span).content

    def read_prompt(self, group: GroupKey) -> Prompt:
        """Read the prompt of a group; its images and videos are without their contents."""
        return read_prompt(self.read(self.prompts[group]).fields, uid=group.uid)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, by the tokenizer of the journal's model, which is loaded now."""
        if self._template is None:
            assert self.header is not None
            self._template = load_model_template(config_from_dict(self.header.config))
        return self._template.decode(ids)

    def read_end(
        self, key: Key, recorded: RecordedTrajectory, prompt: Prompt, decode: Decode
    ) -> Trajectory | None:
        """Read a finished trajectory, images and videos without contents; None: it is not finished.

        Args:
            decode: Its ids to text, for who prints it.
        """
        if recorded.end is None:
            return None
        packed = dict(self.read(recorded.end).ends)[key]
        return unpack_end(packed, prompt, decode)


def find_oldest(*versions: int | None) -> int | None:
    """Return the oldest of the versions that are known; None where none is."""
    return min((each for each in versions if each is not None), default=None)


def read_journal(path: Path) -> JournalIndex:
    """Index a journal; a torn tail is left out.

    Raises:
        JournalError: It cannot be read, is no journal, or is damaged; names the byte.
    """
    index = JournalIndex(path)
    for start, payload in read_frames(path):
        if payload is None:
            index.torn_size = path.stat().st_size - start
            break
        span = Span(start + HEAD.size, len(payload))
        try:
            record = decode_record(payload)
            if isinstance(record, kinds.Header) is not (index.header is None):
                raise LookupError("expected the header first, and once")
            index.add(span, record)
        except (msgspec.MsgspecError, LookupError) as error:
            raise JournalError(f"{path}: the record at byte {start}: {error}") from error
        index.size = span.start + span.size
    return index


def read_finished(path: Path, known: Container[Key] = ()) -> dict[Key, Trajectory]:
    """Read the trajectories that a journal has finished, in the order of their first records.

    Images and videos are without their contents. Messages are decoded with the tokenizer of the
    journal's model once they are read.

    Args:
        known: Those that are left out.

    Raises:
        JournalError: It cannot be read, is no journal, or is damaged.
    """
    index = read_journal(path)
    index.warn_of_tail("left out")
    find_prompt = cache(index.read_prompt)
    found: dict[Key, Trajectory] = {}
    for key, recorded in index.trajectories.items():
        if key not in known:
            trajectory = index.read_end(key, recorded, find_prompt(key.group), index.decode)
            if trajectory is not None:
                found[key] = trajectory
    return found


def load_trajectories(path: Path | str) -> list[Trajectory]:
    """The trajectories of a ``trajectories.jsonl``, or those that a journal has finished.

    In the order of the file: that of the rows where `RolloutBatch.save` wrote it. In the order of
    (group, member) `collate` makes a batch of them. Where ``rollout run`` did not come to save a
    batch, the journal is read that it left beside the path. Images and videos are there without
    their contents, which `RolloutBatch.load` has. A last record of a journal that was cut short is
    left out, with a warning.

    Args:
        path: One of these, or the directory of them.

    Raises:
        RolloutError: The file cannot be read, or a line describes no trajectory; names it.
    """
    from rollout.batch.storage import JOURNAL, TRAJECTORIES, read_trajectories  # imports torch

    path = Path(path)
    if path.is_dir():
        path /= TRAJECTORIES
    beside = path.with_name(JOURNAL)
    if not path.exists() and path.name == TRAJECTORIES and beside.exists():
        path = beside
    is_journal = False
    with suppress(OSError), path.open("rb") as file:  # reading it says better why it cannot be
        is_journal = file.read(len(MAGIC_PREFIX)) == MAGIC_PREFIX
    return list(read_finished(path).values()) if is_journal else read_trajectories(path)
