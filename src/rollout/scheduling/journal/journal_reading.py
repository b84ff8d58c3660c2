"""What a journal holds: found by one pass over the file, read where it is wanted."""

from __future__ import annotations

import logging
import mmap
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import attrs
import msgspec

from rollout.errors import JournalError
from rollout.scheduling.journal.entries import (
    BEGUN_AGAIN,
    UNWANTED,
    AnswersEntry,
    DeliveredEntry,
    EndEntry,
    Entry,
    Header,
    Key,
    MediumEntry,
    PromptEntry,
    ReturnedShortEntry,
    SourceEndedEntry,
    TurnEntry,
    VersionEntry,
    answers_in,
    decode,
)
from rollout.scheduling.journal.frames import (
    MAGIC,
    Damage,
    Frame,
    TornTail,
    check_magic,
    frames,
    records_of,
)
from rollout.scheduling.journal.told_rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

logger = logging.getLogger("rollout.journal")

#: Step, uid, whether it validates, and the number of the call.
PromptKey = tuple[int, str, bool, int]


class Payload(NamedTuple):
    """Where a record lies in the file."""

    start: int
    size: int


@attrs.define(eq=False)
class Recorded:
    """What there is of one trajectory.

    Attributes:
        start: How often it had begun from its start, the first time apart.
        turns, answers: Turns, and answers of tools, since it began last, in order.
        stateful: Tools called since then whose last state nobody holds.
        end: The trajectory, once it is finished.
        delivered_in: The step of the call that gave it to its caller; `UNWANTED` where none ever
            will, None while nobody has it.
        oldest: Version of the oldest weights that sampled for it since; None where none did.
    """

    start: int = 0
    turns: list[Payload] = attrs.field(factory=list)
    answers: list[Payload] = attrs.field(factory=list)
    stateful: set[str] = attrs.field(factory=set)
    end: Payload | None = None
    delivered_in: int | None = None
    oldest: int | None = None

    @property
    def is_begun(self) -> bool:
        """Whether there is anything that could be given again."""
        return bool(self.turns or self.answers)

    def note_end(self, end: Payload) -> None:
        """It is finished.

        Journals of before may have two beginnings under one key, both from the start: after an end
        the turns of another one, and its end. Then only those are of the trajectory.
        """
        if self.end is not None:
            since = [each for each in self.turns if each > self.end]
            if since:
                self.turns = since
                self.answers = [each for each in self.answers if each > self.end]
        self.end = end


class Contents:
    """Of a journal.

    Attributes:
        header: None where a death cut it short: there is nothing else then.
        version: The weights that the engines had last; None where nobody said.
        prompts: By step, uid and call.
        trajectories: In the order in which they are first spoken of.
        ended_sources: By the step of the call that was told of their end.
        missing: Groups that a call of a step returned without, by that step.
        media: Contents of images and videos, by digest.
        given_at: Of groups, by step, uid and call, what sorts them as they were delivered.
        size: Of its whole frames, in bytes.
        torn: What follows them.
        damages: Places between them that hold none.
    """

    def __init__(self) -> None:
        self.header: Header | None = None
        self.version: int | None = None
        self.prompts: dict[PromptKey, Payload] = {}
        self.trajectories: dict[Key, Recorded] = {}
        self.ended_sources: dict[int, int | None] = {}
        self.missing: dict[int, int] = {}
        self.media: dict[str, Payload] = {}
        self.size = 0
        self.torn: TornTail | None = None
        self.damages: list[Damage] = []
        self.given_at: dict[tuple[int, str, int], tuple[int, int]] = {}
        self._deliveries: dict[tuple[int, str, int], int] | None = None
        self._oldest: dict[tuple[int, str, int], int | None] | None = None

    def add(self, payload: Payload, entry: Entry) -> None:
        """One more record."""
        match entry:
            case Header():
                self.header = self.header or entry
            case PromptEntry():
                key = (entry.step, entry.uid, entry.validate, entry.call)
                self.prompts[key] = payload
            case TurnEntry():
                recorded = self._begun(entry.key, entry.start)
                recorded.turns.append(payload)
                recorded.oldest = oldest_of(recorded.oldest, *(v for v, _ in entry.versions))
            case AnswersEntry():
                recorded = self._begun(entry.key, entry.start)
                recorded.answers.append(payload)
                recorded.stateful -= entry.snapshots.keys()
                recorded.stateful |= set(entry.stateful)
            case EndEntry():
                self._of(entry.key).note_end(payload)
            case DeliveredEntry():
                is_given = entry.step not in (UNWANTED, BEGUN_AGAIN)
                for at, each in enumerate(entry.keys):
                    self._of(each).delivered_in = each.step if entry.step is None else entry.step
                    if is_given and not each.validate:  # else it is another one of the same name
                        self.given_at[each.step, each.uid, each.call] = payload.start, at
            case VersionEntry():
                self.version = entry.version
            case MediumEntry():
                self.media[entry.digest] = payload
            case SourceEndedEntry():
                self.ended_sources[entry.step] = entry.source
            case ReturnedShortEntry():
                self.missing[entry.step] = entry.missing

    def deliveries(self) -> dict[tuple[int, str, int], int]:
        """Of groups, by step, uid and call, the step of the call that gave them to its caller.

        None is of a validation, whose trajectories may have the same names.
        """
        if self._deliveries is None:
            self._deliveries = {
                (key.step, key.uid, key.call): each.delivered_in
                for key, each in self.trajectories.items()
                if each.delivered_in is not None and not key.validate
            }
        return self._deliveries

    def oldest(self) -> dict[tuple[int, str, int], int | None]:
        """The oldest weights that sampled for a group, by step, uid and call."""
        if self._oldest is None:
            self._oldest = {}
            for key, each in self.trajectories.items():
                group = key.step, key.uid, key.call
                if not key.validate:  # else it is another one of the same name
                    self._oldest[group] = oldest_of(self._oldest.get(group), each.oldest)
        return self._oldest

    def _of(self, key: Key) -> Recorded:
        return self.trajectories.setdefault(key, Recorded())

    def _begun(self, key: Key, start: int) -> Recorded:
        recorded = self._of(key)
        if start > recorded.start:
            recorded.start, recorded.stateful = start, set()
            recorded.turns, recorded.answers, recorded.oldest = [], [], None
        return recorded


def oldest_of(*versions: int | None) -> int | None:
    """The oldest of the versions that are known; None where none is."""
    return min((each for each in versions if each is not None), default=None)


def read_journal(path: Path, *, skips_damage: bool = False) -> Contents:
    """What a journal holds; a tail that is no whole record is left out, and named in `torn`.

    Args:
        path: Of the file.
        skips_damage: Whether places that are damaged are left out as well, and named in `damages`.

    Raises:
        JournalError: It cannot be read, is none, or is damaged.
    """
    contents = Contents()
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                return contents
            with closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as mapped:
                data = memoryview(mapped)
                try:
                    following = _scan(path, data, contents)
                finally:
                    data.release()
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error
    if contents.damages and not skips_damage:
        raise JournalError(_damaged(path, contents.damages, following))
    return contents


def _damaged(path: Path, damages: Sequence[Damage], following: int) -> str:
    first = damages[0]
    places = "" if len(damages) == 1 else f", the first of {len(damages)} such places"
    return (
        f"{path}: is damaged: the {first.size} bytes from byte {first.start} on hold no whole "
        f"record{places}, and {following} whole frames follow. Nothing is cut off. Where there is "
        f"no better copy, rollout.load_trajectories reads what can be read, and its first "
        f"{first.start} bytes alone can be resumed (truncate --size={first.start})"
    )


def _scan(path: Path, data: memoryview, contents: Contents) -> int:
    """Read it; how many whole frames follow the first place that is damaged."""
    following = 0
    if not check_magic(path, data):
        contents.torn = TornTail(0, len(data))
        return following
    contents.size = len(MAGIC)
    for frame in frames(data):
        if isinstance(frame, TornTail):
            contents.torn = frame
            break
        if isinstance(frame, Damage):
            contents.damages.append(frame)
            continue
        following += len(contents.damages) > 0
        end = frame.stop
        try:
            for payload, entry in entries_of(frame):
                contents.add(payload, entry)
        except (msgspec.MsgspecError, ValueError) as error:
            raise JournalError(f"{path}: the frame at byte {frame.start}: {error}") from error
        finally:
            frame.payload.release()
        contents.size = end
    return following


def entries_of(frame: Frame) -> list[tuple[Payload, Entry]]:
    """The records of a frame, and where they lie; the answers in a turn's stand after it.

    Raises:
        msgspec.MsgspecError: It holds something else.
    """
    found: list[tuple[Payload, Entry]] = []
    for start, record in records_of(frame):
        payload = Payload(start, len(record))
        found += [(payload, each) for each in parts_of(decode(record))]
    return found


def parts_of(entry: Entry) -> list[Entry]:
    """It; of a turn with answers the turn, and these as a record of their own."""
    answers = answers_in(entry) if isinstance(entry, TurnEntry) else None
    return [entry] if answers is None else [entry, answers]


def reader_of(path: Path) -> Callable[[Payload], Entry]:
    """Reads single records of a journal that was scanned."""

    def read(payload: Payload) -> Entry:
        with path.open("rb") as file:
            file.seek(payload.start)
            return decode(file.read(payload.size))

    return read


def say_torn(path: Path, torn: TornTail) -> None:
    """Name what of a journal is left out."""
    logger.warning(
        "%s: its last %d bytes, from byte %d on, hold no whole record and are cut off: what wrote "
        "it was ended meanwhile, or the file is damaged there",
        path,
        torn.size,
        torn.start,
    )


def say_damaged(path: Path, contents: Contents) -> None:
    """Name what of a journal is left out between its records."""
    for each in contents.damages:
        logger.warning(
            "%s: the %d bytes from byte %d on hold no whole record and are left out, though others "
            "follow: the file is damaged there",
            path,
            each.size,
            each.start,
        )


class RecordedMedia:
    """Contents of images and videos by their digests, read where they are wanted."""

    def __init__(self, payloads: Mapping[str, Payload], read: Callable[[Payload], Entry]) -> None:
        self._payloads, self._read = payloads, read

    def get(self, digest: str, /) -> bytes | None:
        """That of one; None where the journal has none."""
        payload = self._payloads.get(digest)
        if payload is None:
            return None
        entry = self._read(payload)
        assert isinstance(entry, MediumEntry)
        return entry.content


def steps_of(
    recorded: Recorded, read: Callable[[Payload], Entry]
) -> tuple[list[TurnEntry | AnswersEntry], Rows]:
    """Turns and answers of a trajectory in order, each in its place; and the rows they tell of."""
    steps: list[TurnEntry | AnswersEntry] = []
    rows = Rows()
    for number, payload in enumerate(sorted({*recorded.turns, *recorded.answers})):
        entry = read(payload)
        if isinstance(entry, TurnEntry):
            rows.add(entry)
        for each in parts_of(entry):
            if isinstance(each, AnswersEntry):
                each.number = number
            if isinstance(each, TurnEntry | AnswersEntry):
                steps.append(each)
    return steps, rows
