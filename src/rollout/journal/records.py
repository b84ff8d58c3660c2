"""The records of a journal: one tagged msgpack array each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from rollout.agents.turn_log import Question
from rollout.chat.plain_data import from_plain


class Key(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Identifies a trajectory of the run.

    Attributes:
        step: The trainer's.
        uid: Of its prompt.
        member: Its number in its group.
        validate: Whether it belongs to a validation.
        call: How many earlier calls of this step had a prompt of this uid.
    """

    step: int
    uid: str
    member: int
    validate: bool = False
    call: int = 0


class Span(NamedTuple):
    """Where the payload of a record lies in the file, in bytes."""

    start: int
    size: int


class Header(msgspec.Struct, array_like=True, tag=0):
    """The first record: which run this is. A resumption must agree.

    Attributes:
        run_seed: All seeds derive from it.
        model: Names and values of what identifies the model.
        config: The keys that may not change, by path.
        prompts: `journal.prompts`; "" where that is None.
        schemas: Of the tools, to read messages with.
        all_config: As `dump_config`.
        engine: The `EngineInfo` of the engines that began the run, by field.
    """

    run_seed: int
    model: dict[str, Any]
    config: dict[str, Any]
    prompts: str
    schemas: list[dict[str, Any]]
    all_config: dict[str, Any]
    engine: dict[str, Any] = {}


class PromptRecord(msgspec.Struct, array_like=True, tag=1):
    """A prompt of `generate` or `stream`, before its members.

    Attributes:
        fields: See `pack_prompt`.
    """

    step: int
    uid: str
    validate: bool
    call: int
    fields: bytes


class PullRecord(msgspec.Struct, array_like=True, tag=2):
    """A prompt that was pulled from a source.

    Attributes:
        number: Its number among all prompts that the run pulled.
        step: Of the call that pulled it.
        digest: Of the prompt as its source gave it.
        fields: See `pack_prompt`.
    """

    number: int
    step: int
    digest: bytes
    fields: bytes


class GroupRecord(msgspec.Struct, array_like=True, tag=3):
    """The members of a pulled prompt begin, or begin again, under this step, uid and call."""

    number: int
    step: int
    uid: str
    call: int


class DroppedRecord(msgspec.Struct, array_like=True, tag=4):
    """Nobody will get the group of this pull: it was refused, dropped or discarded."""

    number: int


class TurnRecord(msgspec.Struct, array_like=True, tag=5, gc=False):
    """One turn that an engine sampled.

    Attributes:
        start: How often its trajectory had begun again before.
        segment: Session id of its segment.
        turn: Its number in the conversation, from 0.
        question: The tokens before it, and its seed.
        ids, log_probs: int32 and float32, little-endian.
        versions: Runs of weight version and number of ids.
        seconds: How long it took.
        top: Most likely ids of each token: their number, ids, log-probs; None where not wanted.
        experts: Routed experts: layers, top_k, first token, int16; None where not wanted.
    """

    key: Key
    start: int
    segment: str
    turn: int
    question: Question
    ids: bytes
    log_probs: bytes
    versions: list[list[int]]
    finish_reason: str | None
    cached_tokens: int
    resumes: int
    seconds: float
    top: tuple[int, bytes, bytes] | None = None
    experts: tuple[int, int, int, bytes] | None = None


class ResultsRecord(msgspec.Struct, array_like=True, tag=6):
    """What tools answered to the calls of one turn.

    Attributes:
        turn: Number of turns of the conversation so far.
        question: The tokens before the calls, and the calls.
        results: The fields of each `ToolResult`, media without contents; of most only the text.
        seconds: Time in calls.
        stateful: Tools among them that keep a state, which is lost with the process.
    """

    key: Key
    start: int
    segment: str
    turn: int
    question: Question
    results: list[str | list[Any]]
    seconds: float
    stateful: Sequence[str] = ()


class EndRecord(msgspec.Struct, array_like=True, tag=7):
    """Finished trajectories, packed; those of a group that was rewarded stand in one record."""

    ends: list[tuple[Key, bytes]]


class DeliveredRecord(msgspec.Struct, array_like=True, tag=8):
    """A caller has these trajectories.

    Attributes:
        step: Of the call that delivered them; None: their own.
    """

    keys: list[Key]
    step: int | None = None


class ShortRecord(msgspec.Struct, array_like=True, tag=9):
    """A `collect` of this step returned without so many of its groups, and no error."""

    step: int
    missing: int


class VersionRecord(msgspec.Struct, array_like=True, tag=10):
    """The engines have weights of this version from here on."""

    version: int


class MediumRecord(msgspec.Struct, array_like=True, tag=11):
    """The content of an image or video, once, before the first record that refers to it."""

    digest: str
    content: bytes


Record = (
    Header
    | PromptRecord
    | PullRecord
    | GroupRecord
    | DroppedRecord
    | TurnRecord
    | ResultsRecord
    | EndRecord
    | DeliveredRecord
    | ShortRecord
    | VersionRecord
    | MediumRecord
)

_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record, ext_hook=from_plain)


def decode_record(payload: bytes) -> Record:
    """Decode a payload; raises `msgspec.MsgspecError` where it is no record."""
    return _decoder.decode(payload)
