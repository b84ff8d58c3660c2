"""A finished trajectory as bytes, and back, bit for bit."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import convert
from msgspec.structs import replace

from rollout.agents.kept_messages import KeptMessages, PackedMessages, TurnReader, pack_texts
from rollout.chat.media_records import message_record, without_content
from rollout.chat.packed_transcript import PackedTranscript
from rollout.chat.trajectory import Parent, Segment, Trajectory
from rollout.chat.transcript import Transcript
from rollout.errors import JournalError
from rollout.medium import Media, PlacedMedia
from rollout.scheduling.journal.plain_data import (
    Unwritable,
    encoder,
    plain,
    restored,
)
from rollout.types import Cause, Message, Outcome, Prompt, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.scheduling.journal.told_rows import Rows, ToldRow

    #: What reads messages whose tools have these schemas; None: those of the prompt.
    ReaderOf = Callable[[Sequence[Mapping[str, Any]] | None], TurnReader]

Schemas = list[dict[str, Any]]


class _Segment(msgspec.Struct, array_like=True):
    """A segment.

    Attributes:
        transcript: Without what its turns tell of it.
        messages: The number of those that it is part of.
        told: Its row as they do, how many ids of the last one stayed, and whether all log-probs are
            theirs; None where none does.
    """

    transcript: PackedTranscript
    parent: Parent | None
    purpose: str
    trainable: bool | None
    reward: Any
    token_rewards: bytes | None
    session_id: str
    seeds: list[int]
    messages: int
    media: tuple[PlacedMedia, ...] = ()
    told: tuple[int, int, bool] | None = None


class _Trajectory(msgspec.Struct, array_like=True):
    uid: str
    group: int
    member: int
    outcome: Outcome
    reason: str
    limit_source: str | None
    cause: Cause | None
    trainable: bool
    reward: Any
    turn_scores: list[Any]
    tool_rewards: list[Any]
    num_turns: int
    metrics: dict[str, Any]
    extra: dict[Any, Any]
    history: str
    segments: list[_Segment]
    #: Conversations, the trajectory's first, each with the schemas of its tools where they are not
    #: the prompt's.
    messages: list[tuple[PackedMessages, Schemas | None]]


_encode = encoder.encode
_NUMBERS = frozenset((int, float, bool))
_decoder = msgspec.msgpack.Decoder(_Trajectory, ext_hook=restored)


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
    written = _Written(unwritable)
    rows: dict[int, int] = {}
    for at, each in enumerate(trajectory.segments):
        rows[id(each.transcript.prefix)] = at
    numbers = {id(trajectory.messages): 0}
    conversations = [_packed_messages(trajectory.messages, rows, schemas, written)]
    segments = []
    for each in trajectory.segments:
        messages = each.messages
        number = numbers.get(id(messages))
        if number is None:
            number = numbers[id(messages)] = len(conversations)
            conversations.append(_packed_messages(messages, rows, schemas, written))
        segments.append(_packed_segment(each, number, told))
    cause, metrics, reward = trajectory.cause, trajectory.metrics, trajectory.reward
    are_numbers = _NUMBERS.issuperset(map(type, metrics.values()))
    record = _Trajectory(
        trajectory.uid,
        trajectory.group,
        trajectory.member,
        trajectory.outcome,
        trajectory.reason,
        trajectory.limit_source,
        None if cause is None else _encodable(cause),
        trajectory.trainable,
        reward if reward is None or type(reward) is float else plain(reward, "reward"),
        trajectory.turn_scores and plain(trajectory.turn_scores, "turn_scores"),
        trajectory.tool_rewards and plain(trajectory.tool_rewards, "tool_rewards"),
        trajectory.num_turns,
        metrics if are_numbers else written.numbers(metrics, "metrics"),
        written.items(trajectory.extra, "extra") if trajectory.extra else {},
        trajectory.history,
        segments,
        conversations,
    )
    try:
        packed = _encode(record)
    except (OverflowError, UnicodeEncodeError):  # a metric, of which only the type was looked at
        record.metrics = written.numbers(metrics, "metrics")
        packed = _encode(record)
    return packed, written.fault


class _Written(msgspec.Struct):
    """What is written of values that may be no plain data.

    Attributes:
        unwritable: What becomes of them.
        fault: Why one is left out; None where none is.
    """

    unwritable: Unwritable
    fault: JournalError | None = None

    def items(self, mapping: Mapping[Any, Any], where: str) -> dict[Any, Any]:
        """The items of a mapping."""
        written, fault = self.unwritable.items(mapping, where)
        self.fault = self.fault or fault
        return written

    def numbers(self, mapping: Mapping[Any, Any], where: str) -> dict[Any, Any]:
        """The same of one whose values are numbers."""
        written, fault = self.unwritable.items(mapping, where, are_numbers=True)
        self.fault = self.fault or fault
        return written

    def message(self, each: Message) -> list[Any]:
        """The fields of a message."""
        calls = [
            [call.name, self.items(call.arguments, "tool_calls.arguments"), call.id, call.raw]
            for call in each.tool_calls
        ]
        extra = self.items(each.extra, "messages.extra")
        fields = self.items(each.fields, "messages.fields")
        parts = message_record(each).parts
        return [each.role, each.content, calls, each.tool_call_id, each.name, extra, fields, parts]


def _packed_segment(segment: Segment, messages: int, told: Mapping[int, ToldRow]) -> _Segment:
    rewards, reward, transcript = segment.token_rewards, segment.reward, segment.transcript
    row, by_turns = told.get(id(transcript.prefix)), None
    if row is None:
        packed = transcript.packed()
    else:
        pieces, kept = row.untold()
        packed = transcript.packed(pieces, row.turns)
        is_all = not (packed.log_probs or row.is_cut)
        if not is_all:
            packed = transcript.packed(pieces)
        by_turns = (row.number, kept, is_all)
    return _Segment(
        packed,
        segment.parent,
        segment.purpose,
        segment.trainable,
        reward if reward is None else plain(reward, "segments.reward"),
        None if rewards is None else array("f", rewards).tobytes(),
        segment.session_id,
        segment.seeds,
        messages,
        _placed(transcript.media) if transcript.media else (),
        by_turns,
    )


def _packed_messages(
    messages: Sequence[Message],
    rows: Mapping[int, int],
    schemas: Sequence[Mapping[str, Any]],
    written: _Written,
) -> tuple[PackedMessages, Schemas | None]:
    if isinstance(messages, KeptMessages):
        packed = messages.packed(rows, written.message)
        if packed is not None:
            own = messages.schemas
            is_known = own is schemas or list(own) == list(schemas)
            return packed, None if is_known else [dict(each) for each in own]
    return pack_texts([written.message(each) for each in messages]), None


def _placed(media: Sequence[PlacedMedia]) -> tuple[PlacedMedia, ...]:
    return tuple(PlacedMedia(without_content(m.medium), m.start, m.count) for m in media)


def _encodable(cause: Cause) -> Cause:
    words = (cause.type, cause.message, cause.traceback)
    kind, said, where = (each.encode("utf-8", "backslashreplace").decode() for each in words)
    return Cause(type=kind, message=said, traceback=where)


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
    record = _decoder.decode(packed)
    transcripts = [_transcript(each, rows) for each in record.segments]
    for each, transcript in zip(record.segments, transcripts, strict=True):
        transcript.media = tuple(each.media)
    prefixes = [each.prefix for each in transcripts]
    conversations = [
        KeptMessages.from_packed(each, prefixes, reader(schemas), _message)
        for each, schemas in record.messages
    ]
    segments = [
        Segment(
            transcript=transcript,
            parent=each.parent,
            purpose=each.purpose,
            trainable=each.trainable,
            reward=each.reward,
            token_rewards=None if each.token_rewards is None else array("f", each.token_rewards),
            session_id=each.session_id,
            seeds=each.seeds,
            messages=conversations[each.messages],
        )
        for each, transcript in zip(record.segments, transcripts, strict=True)
    ]
    own = {name: getattr(record, name) for name in _SHARED}
    return Trajectory(
        prompt=prompt,  # type: ignore[arg-type]
        segments=segments,
        messages=conversations[0],
        **own,
    )


def _transcript(segment: _Segment, rows: Rows) -> Transcript:
    packed = segment.transcript
    if segment.told is not None:
        number, kept, is_all = segment.told
        pieces, log_probs = rows.row(number, kept)
        packed = replace(packed, ids=[*pieces, *packed.ids])
        if is_all:
            packed = replace(packed, log_probs=log_probs)
    return Transcript.from_packed(packed)


_SHARED = tuple(
    name for name in _Trajectory.__struct_fields__ if name not in ("segments", "messages")
)


def _message(packed: list[Any]) -> Message:
    role, content, calls, tool_call_id, name, extra, fields, parts = packed
    return Message(
        role=role,
        content=content,
        tool_calls=tuple(
            ToolCall(name=name, arguments=arguments, id=id_, raw=raw)
            for name, arguments, id_, raw in calls
        ),
        tool_call_id=tool_call_id,
        name=name,
        extra=extra,
        fields=fields,
        parts=tuple(part if isinstance(part, str) else convert(part, Media) for part in parts),
    )
