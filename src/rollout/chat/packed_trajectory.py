"""A finished trajectory as plain records, and back, bit for bit: for journals and processes.

What `RolloutBatch.save` writes has a format of its own, which people read (`batch.records`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import convert

from rollout.chat.media_records import (
    KnownContents,
    contents_of,
    message_record,
    prompt_messages,
    shows_more_than_text,
    without_content,
)
from rollout.chat.packed_transcript import PackedTranscript
from rollout.chat.plain_data import simplify, to_plain
from rollout.chat.trajectory import Parent, Segment, Trajectory
from rollout.chat.transcript import Transcript
from rollout.medium import Media, PlacedMedia
from rollout.types import Cause, Message, Outcome, Prompt, ToolCall
from rollout.utf8 import encodable, is_encodable

#: Makes plain data of a value of a user's; the text says where it stands, for errors.
WriteValue = Callable[[Any, str], Any]

_NUMBERS = frozenset((int, float, bool))


class PackedSegment(msgspec.Struct, array_like=True):
    """A segment.

    Attributes:
        messages: The number of the conversation that it is part of.
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


class PackedTrajectory(msgspec.Struct, array_like=True):
    """A trajectory without its prompt, its media without their contents."""

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
    segments: list[PackedSegment]
    #: Conversations, the trajectory's first.
    messages: list[Any]


class CompleteTrajectory(msgspec.Struct, array_like=True):
    """A trajectory that a process can read which has nothing else of it.

    Attributes:
        prompt: Its fields; of its messages a `Message` is packed, and a mapping is as it was.
        media: Contents of images and videos by their digests.
    """

    trajectory: PackedTrajectory
    prompt: dict[str, Any] | None
    media: dict[str, bytes]


_SAME_FIELDS = tuple(
    name for name in PackedTrajectory.__struct_fields__ if name not in ("segments", "messages")
)


def pack_trajectory(
    trajectory: Trajectory,
    write: WriteValue,
    pack_messages: Callable[[Sequence[Message]], Any],
) -> PackedTrajectory:
    """The record of a finished trajectory.

    Args:
        write: Makes plain data of its `extra` and its metrics.
        pack_messages: Of one conversation.

    Raises:
        NotPlainError: A reward of it is no plain data; and what the functions raise.
    """
    numbers = {id(trajectory.messages): 0}
    conversations = [pack_messages(trajectory.messages)]
    segments = []
    for each in trajectory.segments:
        number = numbers.setdefault(id(each.messages), len(conversations))
        if number == len(conversations):
            conversations.append(pack_messages(each.messages))
        rewards, media = each.token_rewards, each.transcript.media
        segments.append(
            PackedSegment(
                each.transcript.packed(),
                each.parent,
                each.purpose,
                each.trainable,
                to_plain(each.reward, "segments.reward"),
                None if rewards is None else array("f", rewards).tobytes(),
                each.session_id,
                list(each.seeds),
                number,
                tuple(PlacedMedia(without_content(m.medium), m.start, m.count) for m in media),
            )
        )
    cause, metrics = trajectory.cause, trajectory.metrics
    are_numbers = _NUMBERS.issuperset(map(type, metrics.values()))
    return PackedTrajectory(
        trajectory.uid,
        trajectory.group,
        trajectory.member,
        trajectory.outcome,
        trajectory.reason,
        trajectory.limit_source,
        None if cause is None else pack_cause(cause),
        trajectory.trainable,
        to_plain(trajectory.reward, "reward"),
        to_plain(trajectory.turn_scores, "turn_scores"),
        to_plain(trajectory.tool_rewards, "tool_rewards"),
        trajectory.num_turns,
        metrics if are_numbers else write(metrics, "metrics"),
        write(trajectory.extra, "extra") if trajectory.extra else {},
        trajectory.history,
        segments,
        conversations,
    )


def unpack_trajectory(
    record: PackedTrajectory,
    prompt: Prompt | None,
    unpack_messages: Callable[[Any, Sequence[Transcript]], Sequence[Message]],
) -> Trajectory:
    """The trajectory of a record; its images and videos are without their contents.

    Args:
        prompt: What it started from.
        unpack_messages: Undoes `pack_messages`; given the transcripts of all segments too.
    """
    transcripts = [Transcript.from_packed(each.transcript) for each in record.segments]
    conversations = [unpack_messages(each, transcripts) for each in record.messages]
    segments = []
    for each, transcript in zip(record.segments, transcripts, strict=True):
        transcript.media = each.media
        segments.append(
            Segment(
                transcript=transcript,
                parent=each.parent,
                purpose=each.purpose,
                trainable=each.trainable,
                reward=each.reward,
                token_rewards=(
                    None if each.token_rewards is None else array("f", each.token_rewards)
                ),
                session_id=each.session_id,
                seeds=each.seeds,
                messages=conversations[each.messages],
            )
        )
    return Trajectory(
        prompt=prompt,  # type: ignore[arg-type]
        segments=segments,
        messages=conversations[0],
        **{name: getattr(record, name) for name in _SAME_FIELDS},
    )


def pack_message(message: Message, write: WriteValue) -> list[Any]:
    """The fields of a message, its media without their contents."""
    calls = [
        [call.name, write(call.arguments, "tool_calls.arguments"), call.id, call.raw]
        for call in message.tool_calls
    ]
    return [
        message.role,
        message.content,
        calls,
        message.tool_call_id,
        message.name,
        write(message.extra, "messages.extra"),
        write(message.fields, "messages.fields"),
        message_record(message).parts,
    ]


def unpack_message(packed: Sequence[Any]) -> Message:
    """The message of such fields."""
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


def pack_cause(cause: Cause) -> Cause:
    """A cause as UTF-8 can carry it."""
    words = (cause.type, cause.message, cause.traceback)
    kind, message, traceback = (each.encode("utf-8", "backslashreplace").decode() for each in words)
    return Cause(type=kind, message=message, traceback=traceback)


def pack_complete(trajectory: Trajectory, where: str) -> CompleteTrajectory:
    """A trajectory with its prompt; values that msgpack has no type for are simplified.

    Args:
        where: What it is called in errors.

    Raises:
        NotPlainError: It holds what is no plain data.
    """

    def write(value: Any, place: str) -> Any:
        value = dict(value) if isinstance(value, Mapping) else value
        return to_plain(value, f"{where}.{place}", simplify)

    def pack_messages(messages: Sequence[Message]) -> list[Any]:
        return [pack_message(_make_encodable(each), write) for each in messages]

    packed = pack_trajectory(trajectory, write, pack_messages)
    prompt, fields = trajectory.prompt, None
    if prompt is not None:
        messages = prompt.messages
        if shows_more_than_text(messages):
            messages = prompt_messages(trajectory, messages)
        names = [name for name in Prompt.__struct_fields__ if name != "messages"]
        fields = {name: write(getattr(prompt, name), f"prompt.{name}") for name in names}
        fields["messages"] = [
            pack_message(_make_encodable(each), write)
            if isinstance(each, Message)
            else write(each, f"prompt.messages[{at}]")
            for at, each in enumerate(messages)
        ]
    return CompleteTrajectory(packed, fields, contents_of([trajectory]))


def unpack_prompt(fields: dict[str, Any]) -> Prompt:
    """The prompt of such fields: a list among its messages is a packed `Message`."""
    messages = [unpack_message(m) if type(m) is list else m for m in fields.pop("messages")]
    return Prompt(messages=messages, **fields)


def unpack_complete(record: CompleteTrajectory) -> Trajectory:
    """The trajectory of such a record, its media with their contents."""
    prompt, fields = None, record.prompt
    if fields is not None:
        prompt = unpack_prompt(fields)
    trajectory = unpack_trajectory(
        record.trajectory,
        prompt,
        lambda messages, _: list(map(unpack_message, messages)),
    )
    if record.media:
        KnownContents(record.media, "the trajectory").restore([trajectory])
    return trajectory


def _make_encodable(message: Message) -> Message:
    """A message whose text UTF-8 can carry: halves of characters are U+FFFD."""
    if message.content is None or is_encodable(message.content):
        return message
    return msgspec.structs.replace(message, content=encodable(message.content))
