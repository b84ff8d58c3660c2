"""A finished trajectory as bytes of a journal: without what its turns have written already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from rollout.agents.kept_messages import KeptMessages, PackedMessages, TurnReader, pack_texts
from rollout.chat.packed_trajectory import (
    PackedSegment,
    PackedTrajectory,
    Reference,
    pack_message,
    pack_trajectory,
    unpack_message,
    unpack_trajectory,
)
from rollout.chat.plain_data import NotPlainError, encoder, from_plain
from rollout.chat.transcript import Transcript
from rollout.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.chat.packed_transcript import PackedTranscript
    from rollout.chat.trajectory import Trajectory
    from rollout.scheduling.journal.plain_data import Unwritable
    from rollout.scheduling.journal.told_rows import Rows, ToldRow
    from rollout.types import Message, Prompt

    #: What reads messages whose tools have these schemas; None: those of the prompt.
    ReaderOf = Callable[[Sequence[Mapping[str, Any]] | None], TurnReader]

Schemas = list[dict[str, Any]]
_conversation = tuple[PackedMessages, Schemas | None]
_decoder = msgspec.msgpack.Decoder(PackedTrajectory, ext_hook=from_plain)


def packed_trajectory(
    trajectory: Trajectory,
    schemas: Sequence[Mapping[str, Any]],
    unwritable: Unwritable,
    told: Mapping[int, ToldRow],
) -> tuple[bytes, JournalError | None]:
    """A trajectory without its prompt; and why a value in it is left out, if one is.

    Args:
        trajectory: A finished one.
        schemas: Of the tools that its prompt offers.
        unwritable: What becomes of values that are no plain data.
        told: What its turns told of its rows, by the identity of their ids.
    """
    faults: list[JournalError] = []
    rows = {id(each.transcript.prefix): at for at, each in enumerate(trajectory.segments)}

    def write(items: Mapping[Any, Any], where: str) -> dict[Any, Any]:
        written, fault = unwritable.items(items, where, are_numbers=where == "metrics")
        faults.extend([] if fault is None else [fault])
        return written

    def pack_messages(messages: Sequence[Message]) -> tuple[PackedMessages, Schemas | None]:
        if isinstance(messages, KeptMessages):
            packed = messages.packed(rows, lambda each: pack_message(each, write))
            if packed is not None:
                own = messages.schemas
                is_known = own is schemas or list(own) == list(schemas)
                return packed, None if is_known else [dict(each) for each in own]
        return pack_texts([pack_message(each, write) for each in messages]), None

    def pack_transcript(transcript: Transcript) -> tuple[PackedTranscript, Reference | None]:
        row = told.get(id(transcript.prefix))
        if row is None:
            return transcript.packed(), None
        pieces, kept = row.untold()
        packed = transcript.packed(pieces, row.turns)
        is_all = not (packed.log_probs or row.is_cut)
        return packed if is_all else transcript.packed(pieces), (row.number, kept, is_all)

    try:
        record = pack_trajectory(trajectory, write, pack_messages, pack_transcript)
    except NotPlainError as error:
        raise JournalError(str(error)) from None
    try:
        packed = encoder.encode(record)
    except (OverflowError, UnicodeEncodeError):  # a metric, of which only the type was looked at
        record.metrics = write(trajectory.metrics, "metrics")
        packed = encoder.encode(record)
    return packed, faults[0] if faults else None


def trajectory_of(
    packed: bytes | memoryview,
    prompt: Prompt | None,
    reader: ReaderOf,
    rows: Rows,
) -> Trajectory:
    """The trajectory that was packed; its images and videos are without their contents.

    Args:
        packed: By `packed_trajectory`.
        prompt: What it started from.
        reader: Makes what its messages are read with.
        rows: As its turns tell them.
    """

    def unpack_messages(each: Any, transcripts: Sequence[Transcript]) -> KeptMessages:
        messages, schemas = msgspec.convert(each, _conversation)
        prefixes = [transcript.prefix for transcript in transcripts]
        return KeptMessages.from_packed(messages, prefixes, reader(schemas), unpack_message)

    def unpack_transcript(segment: PackedSegment) -> Transcript:
        packed = segment.transcript
        if segment.reference is not None:
            number, kept, is_all = segment.reference
            pieces, log_probs = rows.row(number, kept)
            packed = replace(packed, ids=[*pieces, *packed.ids])
            if is_all:
                packed = replace(packed, log_probs=log_probs)
        return Transcript.from_packed(packed)

    return unpack_trajectory(_decoder.decode(packed), prompt, unpack_messages, unpack_transcript)
