"""Samples and trajectories as lines of JSON, and back, bit for bit where JSON can.

Floats that JSON cannot write (infinities, NaN) are strings in fields that hold numbers.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollout.batch.json_values import Number, encoded, json_items, json_value, number, numbers
from rollout.batch.sample import Sample
from rollout.chat.media_records import (
    message_record,
    placed_records,
    prompt_messages,
    shows_more_than_text,
)
from rollout.chat.spans import SpanKind
from rollout.chat.trajectory import Parent, Segment, Trajectory
from rollout.chat.transcript import NO_ID, Transcript
from rollout.medium import PlacedMedia
from rollout.types import Cause, Message, Outcome, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _RowRecord(msgspec.Struct, kw_only=True):
    """What samples and trajectories have in common."""

    uid: str
    group: int
    member: int
    num_turns: int
    outcome: Outcome
    reason: str
    limit_source: str | None
    trainable: bool
    reward: Number | None
    turn_scores: list[Number]
    tool_rewards: list[Number]
    metrics: dict[str, Number]
    extra: dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """The fields that a `Sample` and a `Trajectory` share."""
        return {
            **{name: getattr(self, name) for name in _RowRecord.__struct_fields__},
            "reward": None if self.reward is None else float(self.reward),
            "turn_scores": [float(value) for value in self.turn_scores],
            "tool_rewards": [float(value) for value in self.tool_rewards],
            "metrics": {name: float(value) for name, value in self.metrics.items()},
        }


class _SampleRecord(_RowRecord, kw_only=True):
    row: int
    segment: int
    parent: Parent | None
    purpose: str
    session_id: str
    seeds: list[int]


class _ExpertsRecord(msgspec.Struct, kw_only=True):
    """Routed experts of the first tokens of a span: int16 little-endian, in base64.

    Attributes:
        shape: (tokens, layers, top_k).
    """

    shape: tuple[int, int, int]
    int16: bytes


class _SpanRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    kind: SpanKind
    ids: list[int]
    text: str | None = None
    log_probs: list[Number] = msgspec.field(default_factory=list)
    versions: list[tuple[int, int]] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    top_ids: list[list[int]] = msgspec.field(default_factory=list)
    top_log_probs: list[list[Number]] = msgspec.field(default_factory=list)
    routed_experts: _ExpertsRecord | None = None
    media: list[PlacedMedia] = msgspec.field(default_factory=list)


class _SegmentRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A segment; without spans it has the trajectory's own, and without messages too."""

    purpose: str
    parent: Parent | None = None
    trainable: bool | None = None
    reward: Number | None = None
    token_rewards: list[Number] | None = None
    session_id: str = ""
    seeds: list[int] = []
    spans: list[_SpanRecord] | None = None
    messages: list[Message] | None = None


class _TrajectoryRecord(_RowRecord, kw_only=True):
    """A trajectory; `spans` are those of its `transcript`."""

    cause: Cause | None
    prompt: dict[str, Any] | None
    messages: list[Message]
    spans: list[_SpanRecord]
    history: str = "append_only"
    segments: list[_SegmentRecord]


def sample_line(sample: Sample) -> bytes:
    """One line of ``samples.jsonl``."""
    own = {name: getattr(sample, name) for name in _SampleRecord.__struct_fields__}
    return encoded(_SampleRecord(**(own | _row_fields(sample))))


def sample_from_line(line: bytes) -> Sample:
    """The sample of one line; a `msgspec.MsgspecError` says what is wrong with it."""
    record = msgspec.json.decode(line, type=_SampleRecord)
    own = {name: getattr(record, name) for name in _SampleRecord.__struct_fields__}
    return Sample(**(own | record.fields()))


def trajectory_line(trajectory: Trajectory, decode: Callable[[Sequence[int]], str] | None) -> bytes:
    """One line of ``trajectories.jsonl``, with the text of each span where there is `decode`."""
    record = _TrajectoryRecord(
        cause=trajectory.cause,
        prompt=_prompt_fields(trajectory),
        messages=_messages(trajectory.messages, trajectory),
        spans=_span_records(trajectory.transcript, decode),
        history=trajectory.history,
        segments=[_segment_record(segment, trajectory, decode) for segment in trajectory.segments],
        **_row_fields(trajectory),
    )
    return encoded(record)


def _segment_record(
    segment: Segment, trajectory: Trajectory, decode: Callable[[Sequence[int]], str] | None
) -> _SegmentRecord:
    is_main = segment.transcript is trajectory.transcript
    is_told = segment.messages == trajectory.messages
    rewards = segment.token_rewards
    return _SegmentRecord(
        purpose=segment.purpose,
        parent=segment.parent,
        trainable=segment.trainable,
        reward=None if segment.reward is None else number(segment.reward),
        token_rewards=None if rewards is None else numbers(np.array(rewards, dtype=np.float32)),
        session_id=segment.session_id,
        seeds=segment.seeds,
        spans=None if is_main else _span_records(segment.transcript, decode),
        messages=None if is_told else _messages(segment.messages, trajectory),
    )


def trajectory_from_line(line: bytes) -> Trajectory:
    """The trajectory of one line, its transcript appended again, span by span.

    Raises:
        msgspec.MsgspecError: The line is no such record.
        ValueError: Its spans make no transcript.
    """
    record = msgspec.json.decode(line, type=_TrajectoryRecord)
    transcript = _transcript(record.spans)
    return Trajectory(
        transcript=transcript,
        cause=record.cause,
        prompt=_prompt(record.prompt),  # type: ignore[arg-type]
        messages=record.messages,
        history=record.history,
        segments=[_segment(each, record.messages, transcript) for each in record.segments],
        **record.fields(),
    )


def _segment(record: _SegmentRecord, messages: list[Message], transcript: Transcript) -> Segment:
    rewards = record.token_rewards
    return Segment(
        transcript=transcript if record.spans is None else _transcript(record.spans),
        parent=record.parent,
        purpose=record.purpose,
        trainable=record.trainable,
        reward=None if record.reward is None else float(record.reward),
        token_rewards=None if rewards is None else array("f", map(float, rewards)),
        session_id=record.session_id,
        seeds=record.seeds,
        messages=messages if record.messages is None else record.messages,
    )


def _row_fields(row: Sample | Trajectory) -> dict[str, Any]:
    where = f"{row.uid!r} member {row.member}: extra"
    return {
        **{name: getattr(row, name) for name in _RowRecord.__struct_fields__},
        "reward": None if row.reward is None else number(row.reward),
        "turn_scores": [number(value) for value in row.turn_scores],
        "tool_rewards": [number(value) for value in row.tool_rewards],
        "metrics": {name: number(value) for name, value in row.metrics.items()},
        "extra": json_items(row.extra, where),
    }


def _prompt_fields(trajectory: Trajectory) -> dict[str, Any] | None:
    if trajectory.prompt is None:
        return None
    fields = {name: getattr(trajectory.prompt, name) for name in Prompt.__struct_fields__}
    if shows_more_than_text(trajectory.prompt.messages):
        fields["messages"] = prompt_messages(trajectory, trajectory.prompt.messages)
    return json_items(fields, f"{trajectory.uid!r} member {trajectory.member}: prompt")


def _prompt(fields: dict[str, Any] | None) -> Prompt | None:
    if fields is None:
        return None
    known = Prompt.__struct_fields__
    return Prompt(**{name: value for name, value in fields.items() if name in known})


def _messages(messages: Sequence[Message], trajectory: Trajectory) -> list[Message]:
    where = f"{trajectory.uid!r} member {trajectory.member}: messages"
    return [_message(message, f"{where}[{at}]") for at, message in enumerate(messages)]


def _message(message: Message, where: str) -> Message:
    """A message that JSON can hold; what of it JSON cannot is text."""
    message = message_record(message)
    if message.extra or message.fields:
        message = msgspec.structs.replace(
            message,
            extra=json_items(message.extra, f"{where}.extra"),
            fields=json_items(message.fields, f"{where}.fields"),
        )
    plain = json_value(message, where)
    return message if plain is message else Message(role=message.role, content=plain)


def _span_records(
    transcript: Transcript, decode: Callable[[Sequence[int]], str] | None
) -> list[_SpanRecord]:
    log_probs = transcript.log_probs()
    top_ids, top_log_probs = transcript.top_ids(), transcript.top_log_probs()
    experts = transcript.routed_experts()
    records = []
    for span in transcript.spans:
        ids = transcript.span_ids(span).tolist()
        is_generated = span.kind == "generated"
        at = slice(span.start, span.stop)
        width = int((top_ids[span.start] != NO_ID).sum()) if is_generated and ids else 0
        records.append(
            _SpanRecord(
                kind=span.kind,
                ids=ids,
                text=None if decode is None else decode(ids),
                log_probs=numbers(log_probs[at]) if is_generated else [],
                versions=list(span.versions),
                finish_reason=span.finish_reason,
                top_ids=top_ids[at, :width].tolist() if width else [],
                top_log_probs=[numbers(row) for row in top_log_probs[at, :width]] if width else [],
                routed_experts=None
                if experts is None
                else _experts_record(
                    experts[span.start : min(span.stop, transcript.routed_length)]
                ),
                media=placed_records(transcript.media, span.start, span.stop),
            )
        )
    return records


def _transcript(spans: Sequence[_SpanRecord]) -> Transcript:
    transcript = Transcript()
    for span in spans:
        if span.kind == "prompt":
            transcript.append_prompt(span.ids, media=span.media)
        elif span.kind == "observation":
            transcript.append_observation(span.ids, media=span.media)
        else:
            transcript.append_generated(
                span.ids,
                [float(value) for value in span.log_probs],
                versions=span.versions,
                finish_reason=span.finish_reason or "",
                top=(span.top_ids, _floats(span.top_log_probs)) if span.top_ids else None,
            )
    for span in spans:
        told = span.routed_experts
        if told is not None:
            values = np.frombuffer(told.int16, "<i2").reshape(told.shape)
            transcript.append_routed_experts(values)
    return transcript


def _experts_record(values: npt.NDArray[np.int16]) -> _ExpertsRecord | None:
    count, layers, top_k = values.shape
    if not count:
        return None
    return _ExpertsRecord(shape=(count, layers, top_k), int16=values.astype("<i2").tobytes())


def _floats(rows: Sequence[Sequence[Number]]) -> list[list[float]]:
    return [[float(value) for value in row] for row in rows]
