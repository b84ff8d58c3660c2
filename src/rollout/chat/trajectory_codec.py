"""A finished trajectory as one record, for disk, journals and processes, and back bit for bit.

Journals and processes write it as msgpack, `batch.records` as a line of JSON that people read. How
values of users and conversations are written is each writer's; all the rest is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from rollout.chat.messages import Messages
from rollout.chat.plain_data import simplify, to_plain
from rollout.chat.trajectory import Parent, Segment, Trajectory, TrajectoryFacts
from rollout.chat.transcript import Span, Transcript
from rollout.media.records import (
    KnownContents,
    drop_content,
    drop_contents,
    find_shown,
    record_prompt_messages,
)
from rollout.medium import Media, PlacedMedia
from rollout.types import Cause, Message, Prompt, ToolCall
from rollout.utf8 import encodable

#: Makes plain data of a value of a user's; the text says where it stands, for errors.
WriteValue = Callable[[Any, str], Any]

S = TypeVar("S")  # how spans are written
M = TypeVar("M")  # how conversations are written


class SegmentRecord(msgspec.Struct, Generic[S, M], kw_only=True, omit_defaults=True):
    """A segment; without spans it has the trajectory's own, and without messages too.

    Attributes:
        media: Without contents.
        experts: (layers, top_k), and int16 of the first tokens.
    """

    purpose: str
    parent: Parent | None = None
    trainable: bool | None = None
    reward: float | None = None
    token_rewards: list[float] | None = None
    session_id: str = ""
    seeds: list[int] = []
    spans: list[S] | None = None
    media: tuple[PlacedMedia, ...] = ()
    experts: tuple[int, int, bytes] | None = None
    messages: M | None = None


class TrajectoryRecord(TrajectoryFacts, Generic[S, M], kw_only=True):
    """A trajectory; `spans` are those of its `transcript`.

    Attributes:
        prompt: Its fields; None where it is written elsewhere.
    """

    extra: dict[Any, Any]  # journals hold keys of other types too
    cause: Cause | None
    prompt: dict[str, Any] | None = None
    messages: M
    spans: list[S]
    history: str = "append_only"
    segments: list[SegmentRecord[S, M]]


#: As journals and processes have it: what a conversation is, their packing says.
PackedTrajectory = TrajectoryRecord[Span, Any]
#: With the contents of its media by their digests, for who has nothing else of it.
CompleteTrajectory = tuple[TrajectoryRecord[Span, Any], dict[str, bytes]]

#: Values of users' among what both have.
_VALUES = ("reward", "turn_scores", "tool_rewards", "metrics", "extra")
#: Of a segment, in the same form in its record and its row.
SEGMENT_FACTS = ("purpose", "parent", "trainable", "session_id", "seeds")
_SAME = {*TrajectoryFacts.__struct_fields__, "cause", "history"} - {*_VALUES}


def pack_trajectory(
    trajectory: Trajectory,
    write: WriteValue,
    pack_messages: Callable[[Sequence[Message]], Any],
) -> PackedTrajectory:
    """The record of a finished trajectory, without its prompt; its media have no contents.

    Args:
        write: Makes plain data of its values.
        pack_messages: Of one conversation.

    Raises:
        NotPlainError: As `write` does.
    """

    def pack_segment(segment: Segment) -> SegmentRecord[Span, Any]:
        rewards, own = segment.token_rewards, segment.transcript
        is_shared = segment.messages is trajectory.messages
        experts: Any = own.routed_experts()
        if experts is not None:
            experts = (*experts.shape[1:], experts[: own.routed_length].tobytes())
        return SegmentRecord(
            **{name: getattr(segment, name) for name in SEGMENT_FACTS},
            reward=write(segment.reward, "segments.reward"),
            token_rewards=None if rewards is None else array("f", rewards).tolist(),
            spans=None if own is trajectory.transcript else list(own.spans),
            media=tuple(PlacedMedia(drop_content(m.medium), m.start, m.count) for m in own.media),
            experts=experts,
            messages=None if is_shared else pack_messages(segment.messages),
        )

    return TrajectoryRecord(
        **{name: getattr(trajectory, name) for name in _SAME},
        **{name: write(getattr(trajectory, name), name) for name in _VALUES},
        messages=pack_messages(trajectory.messages),
        spans=list(trajectory.transcript.spans),
        segments=list(map(pack_segment, trajectory.segments)),
    )


def unpack_trajectory(
    record: PackedTrajectory,
    prompt: Prompt | None,
    unpack_messages: Callable[[Any], Sequence[Message]],
) -> Trajectory:
    """The trajectory of a record; its images and videos are without their contents.

    Args:
        prompt: What it started from.
        unpack_messages: Undoes `pack_messages`.
    """
    conversation = unpack_messages(record.messages)

    def unpack_segment(packed: SegmentRecord[Span, Any]) -> Segment:
        rewards, own = packed.token_rewards, packed.messages
        spans = record.spans if packed.spans is None else packed.spans
        transcript = Transcript.from_spans(spans, media=packed.media)
        if packed.experts is not None:
            *shape, experts = packed.experts
            transcript.append_routed_experts(np.frombuffer(experts, np.int16).reshape(-1, *shape))
        return Segment(
            **{name: getattr(packed, name) for name in (*SEGMENT_FACTS, "reward")},
            transcript=transcript,
            token_rewards=None if rewards is None else array("f", rewards),
            messages=conversation if own is None else unpack_messages(own),
        )

    return Trajectory(
        **{name: getattr(record, name) for name in (*_SAME, *_VALUES)},
        prompt=prompt,  # type: ignore[arg-type]
        segments=list(map(unpack_segment, record.segments)),
        messages=conversation,
    )


def pack_message(message: Message, write: WriteValue) -> list[Any]:
    """The fields of a message in their order, its media without their contents."""
    return [
        message.role,
        message.content,
        [
            [call.name, write(call.arguments, "tool_calls.arguments"), call.id, call.raw]
            for call in message.tool_calls
        ],
        message.tool_call_id,
        message.name,
        write(message.extra, "messages.extra"),
        write(message.fields, "messages.fields"),
        drop_contents(message).parts,
    ]


def unpack_message(packed: Sequence[Any]) -> Message:
    """The message of such fields."""
    role, content, calls, call_id, name, extra, fields, parts = packed
    return Message(
        role=role,
        content=content,
        tool_calls=tuple(ToolCall(name=n, arguments=a, id=i, raw=r) for n, a, i, r in calls),
        tool_call_id=call_id,
        name=name,
        extra=extra,
        fields=fields,
        parts=tuple(p if isinstance(p, str) else msgspec.convert(p, Media) for p in parts),
    )


def unpack_prompt(fields: Mapping[str, Any]) -> Prompt:
    """The prompt of such fields: a list among its messages is a packed `Message`."""
    messages = [unpack_message(m) if type(m) is list else m for m in fields["messages"]]
    return Prompt(**{**fields, "messages": messages})


def pack_complete(trajectory: Trajectory, where: str) -> CompleteTrajectory:
    """A trajectory with its prompt; values that msgpack has no type for are simplified.

    Args:
        where: What it is called in errors.

    Raises:
        NotPlainError: It holds what is no plain data.
    """

    def write(value: Any, place: str) -> Any:
        return to_plain(value, f"{where}.{place}", simplify)

    def pack(message: Message) -> list[Any]:
        packed = pack_message(message, write)
        packed[1] = packed[1] and encodable(packed[1])
        return packed

    record = pack_trajectory(trajectory, write, lambda messages: list(map(pack, messages)))
    if (prompt := trajectory.prompt) is not None:
        messages = record_prompt_messages(prompt.messages, trajectory.messages)
        record.prompt = {
            name: write(getattr(prompt, name), f"prompt.{name}")
            for name in Prompt.__struct_fields__[1:]  # after the messages
        }
        record.prompt["messages"] = [
            pack(each) if isinstance(each, Message) else write(each, f"prompt.messages[{at}]")
            for at, each in enumerate(messages)
        ]
    return record, collect_contents([trajectory])


def unpack_complete(complete: CompleteTrajectory) -> Trajectory:
    """The trajectory of such a record, its media with their contents."""
    record, contents = complete
    prompt = None if record.prompt is None else unpack_prompt(record.prompt)
    trajectory = unpack_trajectory(record, prompt, lambda own: list(map(unpack_message, own)))
    restore_media(trajectory, KnownContents(contents.get, "the trajectory"))
    return trajectory


def collect_contents(trajectories: Iterable[Trajectory]) -> dict[str, bytes]:
    """The content of each medium in them that has one, by its digest."""
    return {
        each.digest: each.content for each in list_trajectory_media(trajectories) if each.content
    }


def list_trajectory_media(trajectories: Iterable[Trajectory]) -> Iterator[Media]:
    """The media in them; one that several messages or rows show comes several times."""
    for trajectory in trajectories:
        yield from find_shown(trajectory.messages)
        for segment in trajectory.segments:
            yield from find_shown(segment.messages)
            yield from (each.medium for each in segment.transcript.media)


def restore_media(trajectory: Trajectory, contents: KnownContents) -> None:
    """Give its images and videos their contents.

    Raises:
        RolloutError: One lacks, or is another one.
    """

    def restore(messages: Sequence[Message]) -> Sequence[Message]:
        own = contents.restore_messages(messages)
        is_view = own is not messages and isinstance(messages, Messages)
        return Messages(list(own), messages.decode) if is_view else own  # type: ignore[attr-defined]

    owners: list[Trajectory | Segment] = [trajectory, *trajectory.segments]
    restored = {id(owner.messages): restore(owner.messages) for owner in owners}
    for owner in owners:  # several may share their messages
        owner.messages = restored[id(owner.messages)]
    for transcript in trajectory.transcripts:
        transcript.media = tuple(
            PlacedMedia(contents.restore(each.medium), each.start, each.count)
            for each in transcript.media
        )
    if trajectory.prompt is not None:
        messages = contents.restore_messages(trajectory.prompt.messages)
        trajectory.prompt = msgspec.structs.replace(trajectory.prompt, messages=messages)
