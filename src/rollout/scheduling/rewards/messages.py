"""What crosses the pipe to a process of `rewards.processes`: trajectories as plain data."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout.chat.group import Group
from rollout.chat.media_records import (
    KnownContents,
    contents_of,
    message_record,
    placed_records,
    prompt_messages,
    shows_more_than_text,
)
from rollout.chat.packed_transcript import PackedTranscript
from rollout.chat.trajectory import Parent, Segment, Trajectory
from rollout.chat.transcript import Transcript
from rollout.function_refs import FunctionRef
from rollout.medium import PlacedMedia
from rollout.types import Cause, Message, Outcome, Prompt, Reward


class Load(msgspec.Struct, tag=True):
    """Import these functions; `file` and `every_s` are those of an `ImportWatch`."""

    functions: list[FunctionRef]
    file: str = ""
    every_s: float = 0.0


class _Segment(msgspec.Struct, omit_defaults=True):
    transcript: PackedTranscript
    purpose: str
    parent: Parent | None = None
    trainable: bool | None = None
    reward: float | None = None
    token_rewards: bytes | None = None
    session_id: str = ""
    seeds: list[int] = []
    media: list[PlacedMedia] = []
    #: None: those of the trajectory.
    messages: list[Message] | None = None


class _Prompt(msgspec.Struct):
    """The fields of a prompt but for its messages, and those, told apart: `Message` or mapping."""

    fields: dict[str, Any]
    messages: list[tuple[bool, dict[str, Any]]]


class _Trajectory(msgspec.Struct, omit_defaults=True):
    uid: str
    group: int
    member: int
    outcome: Outcome
    reason: str
    limit_source: str | None
    cause: Cause | None
    trainable: bool
    reward: float | None
    turn_scores: list[float]
    tool_rewards: list[float]
    num_turns: int
    metrics: dict[str, float]
    extra: dict[str, Any]
    history: str
    messages: list[Message]
    segments: list[_Segment]
    prompt: _Prompt | None = None
    #: Contents of its images and videos, which stand without them everywhere else, by digest.
    media: dict[str, bytes] = {}

    @classmethod
    def of(cls, trajectory: Trajectory) -> _Trajectory:
        same = set(cls.__struct_fields__) - {"messages", "segments", "prompt", "media"}
        return cls(
            **{name: getattr(trajectory, name) for name in same},
            messages=list(map(message_record, trajectory.messages)),
            segments=[_segment(each, trajectory) for each in trajectory.segments],
            prompt=None if trajectory.prompt is None else _prompt(trajectory.prompt, trajectory),
            media=contents_of([trajectory]),
        )

    def restored(self) -> Trajectory:
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "media"}
        fields["segments"] = [_restored_segment(each, self.messages) for each in self.segments]
        fields["prompt"] = None if self.prompt is None else _restored_prompt(self.prompt)
        trajectory = Trajectory(**fields)
        if self.media:
            KnownContents(self.media, "the trajectory").restore([trajectory])
        return trajectory


class Ask(msgspec.Struct, tag=True):
    """Call a function.

    Attributes:
        trajectories: What it is about: one, or all of a group.
        is_group: Whether it takes the group.
        keywords: What it takes in the place of the trajectory, as verl's functions do.
    """

    function: FunctionRef
    trajectories: list[_Trajectory]
    is_group: bool = False
    keywords: dict[str, Any] | None = None

    @classmethod
    def about(
        cls, function: FunctionRef, subject: Trajectory | Group, keywords: dict[str, Any] | None
    ) -> Ask:
        """The request for one trajectory, or for a group."""
        is_group = isinstance(subject, Group)
        each = subject.trajectories if isinstance(subject, Group) else [subject]
        return cls(function, [_Trajectory.of(one) for one in each], is_group, keywords)

    def subject(self) -> Trajectory | Group:
        """What was asked about."""
        trajectories = [each.restored() for each in self.trajectories]
        if not self.is_group:
            return trajectories[0]
        first = trajectories[0]
        assert first.prompt is not None
        return Group.of(first.uid, first.prompt, trajectories)


Request = Load | Ask


class _Reward(msgspec.Struct, omit_defaults=True):
    value: float
    extra: dict[str, Any] = {}
    token_values: dict[int, bytes] = {}
    segment_values: dict[int, float] = {}


class Reply(msgspec.Struct, omit_defaults=True):
    """What came of it: a reward for each trajectory, or what was raised."""

    rewards: list[_Reward | None] = []
    failure: Cause | None = None

    @classmethod
    def of(cls, rewards: Sequence[Reward | None]) -> Reply:
        """The rewards that were returned, checked before."""
        return cls([None if each is None else _reward(each) for each in rewards])

    def restored(self) -> list[Reward | None]:
        """The same in the driver."""
        return [None if each is None else _restored_reward(each) for each in self.rewards]


def _segment(segment: Segment, trajectory: Trajectory) -> _Segment:
    rewards = segment.token_rewards
    return _Segment(
        transcript=segment.transcript.packed(),
        purpose=segment.purpose,
        parent=segment.parent,
        trainable=segment.trainable,
        reward=segment.reward,
        token_rewards=None if rewards is None else array("f", rewards).tobytes(),
        session_id=segment.session_id,
        seeds=list(segment.seeds),
        media=placed_records(segment.transcript.media, 0, len(segment.transcript)),
        messages=None
        if segment.messages is trajectory.messages
        else list(map(message_record, segment.messages)),
    )


def _restored_segment(segment: _Segment, messages: list[Message]) -> Segment:
    rewards, transcript = segment.token_rewards, Transcript.from_packed(segment.transcript)
    transcript.media = tuple(segment.media)
    return Segment(
        transcript=transcript,
        parent=segment.parent,
        purpose=segment.purpose,
        trainable=segment.trainable,
        reward=segment.reward,
        token_rewards=None if rewards is None else array("f", rewards),
        session_id=segment.session_id,
        seeds=segment.seeds,
        messages=messages if segment.messages is None else segment.messages,
    )


def _prompt(prompt: Prompt, trajectory: Trajectory) -> _Prompt:
    given = prompt.messages
    if shows_more_than_text(given):
        given = prompt_messages(trajectory, given)
    names = [name for name in Prompt.__struct_fields__ if name != "messages"]
    return _Prompt(
        fields={name: getattr(prompt, name) for name in names},
        messages=[
            (True, msgspec.structs.asdict(each))
            if isinstance(each, Message)
            else (False, dict(each))
            for each in given
        ],
    )


def _restored_prompt(prompt: _Prompt) -> Prompt:
    messages = [
        msgspec.convert(fields, Message) if is_message else fields
        for is_message, fields in prompt.messages
    ]
    return Prompt(messages=messages, **prompt.fields)


def _reward(reward: Reward) -> _Reward:
    assert isinstance(reward.token_values, Mapping)
    return _Reward(
        value=reward.value,
        extra=dict(reward.extra),
        token_values={at: array("f", v).tobytes() for at, v in reward.token_values.items()},
        segment_values=dict(reward.segment_values),
    )


def _restored_reward(reward: _Reward) -> Reward:
    return Reward(
        value=reward.value,
        extra=reward.extra,
        token_values={at: array("f", packed) for at, packed in reward.token_values.items()},
        segment_values=reward.segment_values,
    )
