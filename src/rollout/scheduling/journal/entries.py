"""What stands in a journal: one tagged msgpack array for each record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollout.chat.plain_data import from_plain


class Key(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which trajectory of the run.

    Attributes:
        step: The trainer's.
        uid: Of its prompt.
        member: Within its group.
        validate: Whether it is one of a validation.
        call: How many calls of this step had the same uid before.
    """

    step: int
    uid: str
    member: int
    validate: bool = False
    call: int = 0


#: What was asked for, so far as an answer given before is the answer to it again: tokens of the
#: conversation before it, CRC-32 of their ids, and CRC-32 of how the turn is sampled (its seed
#: included) or of the calls of tools.
Place = tuple[int, int, int]
#: Of records in the file.
_NOWHERE: Place = (0, 0, 0)


#: The step of what no call gave to its caller, and none will; and of a group that was left, and
#: begun again as that of another step or call.
UNWANTED, BEGUN_AGAIN = -1, -2


class Header(msgspec.Struct, array_like=True, tag=0):
    """The first record: what the journal is of. Each resumption must agree.

    Attributes:
        run: Names the run.
        run_seed: What all seeds derive from.
        model: Name and value of what identifies the model.
        config: As `dump_config`, of what may not change.
        prompts: Digest of the file of prompts; "" where the prompts come from elsewhere.
        schemas: Of the tools, for readers of messages.
        all_config: As `dump_config`.
        engine: The `EngineInfo` of the engines that began it, by field.
    """

    run: str
    run_seed: int
    model: dict[str, Any]
    config: dict[str, Any]
    prompts: str
    schemas: list[dict[str, Any]]
    all_config: dict[str, Any]
    engine: dict[str, Any] = {}


class PromptEntry(msgspec.Struct, array_like=True, tag=1):
    """A prompt, before its members.

    Attributes:
        fields: Of it, packed.
        pulled: Its uid as its source gave it, see `name_at`; None where it did not come from a
            source of groups.
        source: Number of that source, from 1; 0 in journals of before.
        is_last: Whether the source is a sequence all of which was pulled by then.
        number: Its place among all that were pulled; -1 in journals of before, where that among the
            prompts of the journal stands for it.
    """

    step: int
    uid: str
    validate: bool
    call: int
    fields: bytes
    pulled: str | None = None
    source: int = 0
    is_last: bool = False
    number: int = -1


class GivenAnswers(msgspec.Struct, array_like=True, gc=False):
    """What tools answered to a turn, as part of its record; see `AnswersEntry`.

    Attributes:
        asked: The calls, which were made right after the turn.
        place: See `Rows.add`.
    """

    asked: bytes
    results: list[str | list[Any]]
    seconds: float
    stateful: Sequence[str]
    snapshots: dict[str, Any]
    place: Place = _NOWHERE


class TurnEntry(msgspec.Struct, array_like=True, tag=2, gc=False):
    """One turn: what an engine sampled, and what tools answered to it.

    Attributes:
        start: How often its trajectory had begun from its start before.
        segment: The session of its segment.
        turn: Its number in the conversation, from 0.
        seed: It was sampled with.
        row: The number of its row, whose turns before it follow each other in the file.
        kept: How many ids of the turn before stayed; -1: all.
        context: Ids of the row since that turn, in the pieces in which they came.
        ids, log_probs: int32 and float32, little-endian.
        versions: Runs of weight version and number of ids.
        seconds: That it took.
        top, experts: Most likely ids and their log-probs with their number; routed experts with
            their shape and the first token that they are of. None where nobody asked.
        answers: To its calls; None where there are none, or a record of their own has them.
        place: What was asked, once it is read; see `Rows.add`.
    """

    key: Key
    start: int
    segment: str
    turn: int
    seed: int
    row: int
    kept: int
    context: list[bytes]
    ids: bytes
    log_probs: bytes
    versions: list[list[int]]
    finish_reason: str | None
    cached_tokens: int
    resumes: int
    seconds: float
    top: tuple[int, bytes, bytes] | None = None
    experts: tuple[int, int, int, bytes] | None = None
    answers: GivenAnswers | None = None
    place: Place = _NOWHERE


class AnswersEntry(msgspec.Struct, array_like=True, tag=3):
    """What tools answered to the calls of one turn, after the record of that was written.

    Attributes:
        turn: Turns of the conversation so far.
        results: Of each call the fields of its `ToolResult`, in order, images and videos without
            their contents; of most its text is all.
        seconds: Time in calls.
        stateful: Tools among them whose state nobody holds.
        snapshots: The states of the others that have one, by tool.
        number: Of the record among those of its trajectory, once it is read.
    """

    key: Key
    start: int
    segment: str
    turn: int
    place: Place
    results: list[str | list[Any]]
    seconds: float
    stateful: Sequence[str] = ()
    snapshots: dict[str, Any] = {}
    number: int = 0


class EndEntry(msgspec.Struct, array_like=True, tag=4):
    """A finished trajectory, packed.

    What its turns tell of its rows is not said again; see `ToldRow`.
    """

    key: Key
    trajectory: bytes


class DeliveredEntry(msgspec.Struct, array_like=True, tag=5):
    """Trajectories that the caller has, or that nobody wants any more.

    Attributes:
        step: Of the call that gave them to the caller; None: their own. `UNWANTED` or
            `BEGUN_AGAIN` where none did.
    """

    keys: list[Key]
    step: int | None = None


class VersionEntry(msgspec.Struct, array_like=True, tag=6):
    """The engines have weights of this version from here on."""

    version: int


class MediumEntry(msgspec.Struct, array_like=True, tag=7):
    """The content of an image or video, once, before the first record that refers to it."""

    digest: str
    content: bytes


class SourceEndedEntry(msgspec.Struct, array_like=True, tag=8):
    """The caller of this step was told that its source had ended: given again, it starts over.

    Attributes:
        source: As in `PromptEntry`; None where it gave nothing.
    """

    step: int
    source: int | None


class ReturnedShortEntry(msgspec.Struct, array_like=True, tag=9):
    """A call of this step returned without so many of the groups that it was to have."""

    step: int
    missing: int


Entry = (
    Header
    | PromptEntry
    | TurnEntry
    | AnswersEntry
    | EndEntry
    | DeliveredEntry
    | VersionEntry
    | MediumEntry
    | SourceEndedEntry
    | ReturnedShortEntry
)


def answers_in(entry: TurnEntry | AnswersEntry) -> AnswersEntry | None:
    """The answers of tools in a record, as one of their own."""
    if isinstance(entry, AnswersEntry):
        return entry
    given = entry.answers
    if given is None:
        return None
    return AnswersEntry(
        entry.key,
        entry.start,
        entry.segment,
        entry.turn + 1,
        given.place,
        given.results,
        given.seconds,
        given.stateful,
        given.snapshots,
    )


_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry, ext_hook=from_plain)


def decode(payload: bytes | memoryview) -> Entry:
    """The record of a payload; a `msgspec.MsgspecError` where it is none."""
    return _decoder.decode(payload)
