"""The records of a journal: one tagged msgpack array each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from rollout.agents.turn_log import Question
from rollout.chat.plain_data import from_plain
from rollout.scheduling.members import SourceCallKey


class GroupKey(NamedTuple):
    """Identifies a prompt of a call, and its group.

    Attributes:
        step: The trainer's.
        uid: Of the prompt.
        validate: Whether it belongs to a validation.
        call: How many calls, or groups of a source, this step had before.
    """

    step: int
    uid: str
    validate: bool
    call: int


class Key(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Identifies a trajectory of the run: its group's key, and `member`, its number there."""

    step: int
    uid: str
    member: int
    validate: bool = False
    call: int = 0

    @property
    def group(self) -> GroupKey:
        """Of its prompt."""
        return GroupKey(self.step, self.uid, self.validate, self.call)


class Span(NamedTuple):
    """Where the payload of a record lies in the file, in bytes."""

    start: int
    size: int


class Header(msgspec.Struct, array_like=True, tag=0):
    """The first record: which run this is. A resumption must agree.

    Attributes:
        run_seed: All seeds derive from it.
        config: As `dump_config`.
        files: Fingerprints of what the model's files hold, by what it is.
        schemas: Of the tools, to read messages with.
        engine: The `EngineInfo` of the engines that began the run, by field.
    """

    run_seed: int
    config: dict[str, Any]
    files: dict[str, str]
    schemas: list[dict[str, Any]]
    engine: dict[str, Any]


class PromptRecord(msgspec.Struct, array_like=True, tag=1):
    """A prompt of `generate` or `stream`, before its members; for `fields` see `pack_prompt`."""

    group: GroupKey
    fields: bytes


class PullRecord(msgspec.Struct, array_like=True, tag=2):
    """A prompt that was pulled from a source.

    Attributes:
        number: Its number among all prompts that the run pulled.
        pulled_in: The call that pulled it.
        fields: As its source gave it; see `pack_prompt`.
    """

    number: int
    pulled_in: SourceCallKey
    fields: bytes


class GroupRecord(msgspec.Struct, array_like=True, tag=3):
    """The members of the pulled prompt `number` begin, or begin again, as this group."""

    number: int
    group: GroupKey


class DroppedRecord(msgspec.Struct, array_like=True, tag=4):
    """Nobody will get the group of this pull: it was refused, dropped or discarded."""

    number: int


class Answer(msgspec.Struct, array_like=True):
    """What a trajectory got for a question.

    Attributes:
        start: How often its trajectory had begun again before.
        segment: Session id of its segment.
        turn: Number of turns of the conversation before it.
        question: The tokens before it, and the seed of a turn, or the calls.
    """

    key: Key
    start: int
    segment: str
    turn: int
    question: Question


class TurnRecord(Answer, tag=5, gc=False):
    """One turn that an engine sampled.

    Attributes:
        ids, log_probs: int32 and float32, little-endian.
        versions: Runs of weight version and number of ids.
        seconds: How long it took.
        top: Most likely ids of each token: their number, ids, log-probs; None where not wanted.
        experts: Routed experts: layers, top_k, first token, int16; None where not wanted.
    """

    ids: bytes
    log_probs: bytes
    versions: list[list[int]]
    finish_reason: str | None
    cached_tokens: int
    resumes: int
    seconds: float
    top: tuple[int, bytes, bytes] | None = None
    experts: tuple[int, int, int, bytes] | None = None


class ResultsRecord(Answer, tag=6):
    """What tools answered to the calls of one turn.

    Attributes:
        results: The fields of each `ToolResult`, media without contents; of most only the text.
        seconds: Time in calls.
        stateful: Tools among them that keep a state, which is lost with the process.
    """

    results: list[str | dict[str, Any]]
    seconds: float
    stateful: Sequence[str] = ()


class EndRecord(msgspec.Struct, array_like=True, tag=7):
    """Finished trajectories, packed; those of a group that was rewarded stand in one record."""

    ends: list[tuple[Key, bytes]]


class DeliveredRecord(msgspec.Struct, array_like=True, tag=8):
    """A caller has these trajectories.

    Attributes:
        delivered_in: The call that delivered groups; None: they are trajectories of a list.
        missing: How many groups fewer than it wanted a `collect` returned without an error.
    """

    keys: list[Key]
    delivered_in: SourceCallKey | None = None
    missing: int = 0


class VersionRecord(msgspec.Struct, array_like=True, tag=9):
    """The engines have weights of this version from here on."""

    version: int


class MediumRecord(msgspec.Struct, array_like=True, tag=10):
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
    | VersionRecord
    | MediumRecord
)

_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record, ext_hook=from_plain)


def decode_record(payload: bytes) -> Record:
    """Decode a payload; raises `msgspec.MsgspecError` where it is no record."""
    return _decoder.decode(payload)
