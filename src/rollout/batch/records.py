"""Samples and trajectories as lines of JSON that people read, and back, bit for bit where JSON can.

Floats that JSON cannot write (infinities, NaN) are strings in fields that hold numbers; values of
users that it cannot hold are texts.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout.batch.sample import Sample
from rollout.chat.plain_data import show_value
from rollout.chat.trajectory_codec import TrajectoryRecord, pack_trajectory, unpack_trajectory
from rollout.chat.transcript import Span, SpanKind, Transcript
from rollout.media.records import drop_contents, record_prompt_messages
from rollout.types import Message, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.chat.trajectory import Trajectory

    Decode = Callable[[Sequence[int]], str]

logger = logging.getLogger("rollout.batch")


class _SpanLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A `Span` in numbers, and its text where there is a tokenizer."""

    kind: SpanKind
    ids: list[int]
    text: str | None = None
    log_probs: list[float] = []
    versions: list[tuple[int, int]] = []
    finish_reason: str | None = None
    top_ids: list[list[int]] = []
    top_log_probs: list[list[float]] = []


# Not strict: a string such as "nan" is the float that JSON cannot write.
_decode_sample = msgspec.json.Decoder(Sample, strict=False).decode
_decode_line = msgspec.json.Decoder(TrajectoryRecord[_SpanLine, list[Message]], strict=False).decode


def sample_line(sample: Sample) -> bytes:
    """One line of ``samples.jsonl``."""
    where = f"{sample.uid!r} member {sample.member}: extra"
    record = msgspec.structs.replace(sample, extra=_write(sample.extra, where))
    _set_floats(record)
    return _encode(record)


def sample_from_line(line: bytes) -> Sample:
    """The sample of one line; a `msgspec.MsgspecError` says what is wrong."""
    return _decode_sample(line)


def trajectory_line(trajectory: Trajectory, decode: Decode | None) -> bytes:
    """One line of ``trajectories.jsonl``, with the text of each span where there is `decode`."""

    def write(value: Any, name: str) -> Any:
        return _write(value, f"{trajectory.uid!r} member {trajectory.member}: {name}")

    def write_messages(messages: Sequence[Message]) -> Any:
        return write([drop_contents(each) for each in messages], "messages")

    record: Any = pack_trajectory(trajectory, write, write_messages)
    _set_floats(record)
    record.spans = [_write_span(span, decode) for span in record.spans]
    for segment in record.segments:
        if segment.spans is not None:
            segment.spans = [_write_span(span, decode) for span in segment.spans]
        if segment.token_rewards is not None:
            segment.token_rewards = array("f", segment.token_rewards).tolist()
    prompt = trajectory.prompt
    if prompt is not None:
        fields = {name: getattr(prompt, name) for name in Prompt.__struct_fields__}
        fields["messages"] = record_prompt_messages(prompt.messages, trajectory.messages)
        record.prompt = write(fields, "prompt")
    return _encode(record)


def trajectory_from_line(line: bytes) -> Trajectory:
    """The trajectory of one line, its transcript appended again, span by span.

    Raises:
        msgspec.MsgspecError: The line is no such record.
        ValueError: Its spans make no transcript.
    """
    record: Any = _decode_line(line)
    record.spans = _read_spans(record.spans)
    for segment in record.segments:
        if segment.spans is not None:
            segment.spans = _read_spans(segment.spans)
        if segment.token_rewards is not None:
            segment.token_rewards = array("f", map(float, segment.token_rewards)).tobytes()
    prompt = None if record.prompt is None else Prompt(**record.prompt)
    return unpack_trajectory(record, prompt, lambda messages: messages)


def _write_span(span: Span, decode: Decode | None) -> _SpanLine:
    ids = array("i", span.ids).tolist()
    line = _SpanLine(
        kind=span.kind,
        ids=ids,
        text=None if decode is None else decode(ids),
        log_probs=np.frombuffer(span.log_probs, np.float32).tolist(),
        versions=list(span.versions),
        finish_reason=span.finish_reason,
    )
    if span.top is not None:
        width, top_ids, top_log_probs = span.top
        line.top_ids = np.frombuffer(top_ids, np.int32).reshape(-1, width).tolist()
        floats: Any = np.frombuffer(top_log_probs, np.float32).reshape(-1, width).tolist()
        line.top_log_probs = floats
    return line


def _read_spans(lines: Sequence[_SpanLine]) -> list[Span]:
    transcript = Transcript()
    for line in lines:
        if line.kind == "prompt":
            transcript.append_prompt(line.ids)
        elif line.kind == "observation":
            transcript.append_observation(line.ids)
        else:
            transcript.append_generated(
                line.ids,
                line.log_probs,
                versions=line.versions,
                finish_reason=line.finish_reason or "",
                top=(line.top_ids, line.top_log_probs) if line.top_ids else None,
            )
    return list(transcript.spans)


def _set_floats(record: Any) -> None:
    """Whole numbers are written as the floats that they are read as."""
    record.reward = None if record.reward is None else float(record.reward)
    record.turn_scores = list(map(float, record.turn_scores))
    record.tool_rewards = list(map(float, record.tool_rewards))
    record.metrics = {name: float(value) for name, value in record.metrics.items()}


def _write(value: Any, where: str) -> Any:
    """`value`, with a text in the place of what JSON cannot hold, of which a warning tells."""
    if isinstance(value, Mapping):
        return {str(key): _write(item, f"{where}[{key!r}]") for key, item in value.items()}
    try:
        msgspec.json.encode(value, enc_hook=_list_array)
    except UnicodeEncodeError:
        return value  # `_encode` writes half a surrogate pair as an escape
    except Exception as error:  # whatever a foreign object raises
        if isinstance(value, msgspec.Struct):
            names = value.__struct_fields__
            own = {name: _write(getattr(value, name), f"{where}.{name}") for name in names}
            return msgspec.structs.replace(value, **own)
        if isinstance(value, list | tuple) and all(isinstance(v, msgspec.Struct) for v in value):
            return [_write(each, f"{where}[{at}]") for at, each in enumerate(value)]
        logger.warning("%s is saved as text: %s", where, error)
        return show_value(value)
    return value


def _list_array(value: Any) -> Any:
    """Arrays and tensors as nested lists, their scalars as numbers."""
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"JSON cannot hold a {type(value).__qualname__}")
    return tolist()


def _encode(record: msgspec.Struct) -> bytes:
    plain = msgspec.to_builtins(record, enc_hook=_list_array, str_keys=True)
    return msgspec.json.encode(make_writable(plain))


def make_writable(value: Any) -> Any:
    """Builtins without floats that JSON, and halves of surrogate pairs that UTF-8 cannot hold."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {make_writable(key): make_writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))  # long lists are ids and log-probs
        if kinds <= {int} or (kinds == {float} and all(map(math.isfinite, value))):
            return value
        return [make_writable(item) for item in value]
    return value
