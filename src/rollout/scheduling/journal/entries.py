"""What stands in a journal: one tagged msgpack array for each record."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.scheduling.journal.plain_data import restored


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
        pulled: Its uid as its source gave it; None where it did not come from a source of groups.
    """

    step: int
    uid: str
    validate: bool
    call: int
    fields: bytes
    pulled: str | None = None


class TurnEntry(msgspec.Struct, array_like=True, tag=2, gc=False):
    """What an engine sampled in one turn.

    Attributes:
        start: How often its trajectory had begun from its start before.
        segment: The session of its segment.
        turn: Its number in the conversation, from 0.
        ids, log_probs: int32 and float32, little-endian.
        versions: Runs of weight version and number of ids.
        seconds: That it took.
        top, experts: Most likely ids and their log-probs with their number; routed experts with
            their shape and the first token that they are of. None where nobody asked.
    """

    key: Key
    start: int
    segment: str
    turn: int
    place: Place
    ids: bytes
    log_probs: bytes
    versions: list[list[int]]
    finish_reason: str | None
    cached_tokens: int
    resumes: int
    seconds: float
    top: tuple[int, bytes, bytes] | None = None
    experts: tuple[int, int, int, bytes] | None = None


class AnswersEntry(msgspec.Struct, array_like=True, tag=3):
    """What tools answered to the calls of one turn.

    Attributes:
        results: Of each call the fields of its `ToolResult`, in order, images and videos without
            their contents; of most its text is all.
        seconds: Time in calls.
        stateful: Tools among them whose state nobody holds.
        snapshots: The states of the others that have one, by tool.
    """

    key: Key
    start: int
    segment: str
    turn: int
    place: Place
    results: list[str | list[Any]]
    seconds: float
    stateful: list[str] = []
    snapshots: dict[str, Any] = {}


class EndEntry(msgspec.Struct, array_like=True, tag=4):
    """A finished trajectory, packed.

    What an engine sampled for it stands in its turns: there is the number of one since `start`.
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


Entry = (
    Header
    | PromptEntry
    | TurnEntry
    | AnswersEntry
    | EndEntry
    | DeliveredEntry
    | VersionEntry
    | MediumEntry
)

_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry, ext_hook=restored)


def decode(payload: bytes | memoryview) -> Entry:
    """The record of a payload; a `msgspec.MsgspecError` where it is none."""
    return _decoder.decode(payload)
