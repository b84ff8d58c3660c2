"""Samples and trajectories as lines of JSON that people read, and back, bit for bit where JSON can.

Floats that JSON cannot write (infinities, NaN) are strings in fields that hold numbers; values of
users that it cannot hold are texts.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout.chat.messages import Messages
from rollout.chat.plain_data import MAX_DEPTH, show_value
from rollout.chat.trajectory import MAIN, Parent, TrajectoryFacts
from rollout.chat.trajectory_codec import TrajectoryRecord, pack_trajectory, unpack_trajectory
from rollout.chat.transcript import Span, SpanKind, Transcript
from rollout.media.records import drop_contents, record_prompt_messages
from rollout.types import Message, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.medium import PlacedMedia

    Decode = Callable[[Sequence[int]], str]

logger = logging.getLogger("rollout.batch")


class Sample(TrajectoryFacts, kw_only=True):
    """One row of a batch beside its tensors; the fields are those of its `Trajectory`.

    Attributes:
        row: Its place in the tensors.
        segment: Which segment of the trajectory it is: an index.
        parent: The segment that it departs from, and the position; None for the first.
        purpose: As `Segment.purpose`.
        session_id, seeds: As those of the `Segment`.
        trainable: Whether a trainer may learn from this row, apart from the mask.
        reward: Of this row: the segment's own, or else its trajectory's; None where it is unknown.
    """

    row: int
    segment: int = 0
    parent: Parent | None = None
    purpose: str = MAIN
    session_id: str = ""
    seeds: list[int] = msgspec.field(default_factory=list)


def count_tokens(transcript: Transcript) -> tuple[int, int]:
    """Tokens of the prompt, and of the response up to the last generated one."""
    response = transcript.response_length - transcript.trailing_observation_length
    return transcript.prompt_length, response


def find_media(transcript: Transcript) -> list[PlacedMedia]:
    """The media among the tokens of a row."""
    stop = sum(count_tokens(transcript))
    return [each for each in transcript.media if each.start + each.count <= stop]


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
sample_from_line = msgspec.json.Decoder(Sample, strict=False).decode
_decode_line = msgspec.json.Decoder(TrajectoryRecord[_SpanLine, list[Message]], strict=False).decode


def sample_line(sample: Sample) -> bytes:
    """One line of ``samples.jsonl``."""
    extra = _write(sample.extra, f"{sample.uid!r} member {sample.member}: extra")
    metrics = make_floats(sample.metrics)
    return encode_json(msgspec.structs.replace(sample, extra=extra, metrics=metrics))


def trajectory_line(trajectory: Trajectory, decode: Decode | None) -> bytes:
    """One line of ``trajectories.jsonl``, with the text of each span where there is `decode`."""

    def write(value: Any, name: str) -> Any:
        return _write(value, f"{trajectory.uid!r} member {trajectory.member}: {name}")

    record: Any = pack_trajectory(
        trajectory, write, lambda own: write(list(map(drop_contents, own)), "messages")
    )
    record.metrics = make_floats(record.metrics)
    for each in (record, *record.segments):
        each.spans = each.spans and [_write_span(span, decode) for span in each.spans]
    if (prompt := trajectory.prompt) is not None:
        messages = record_prompt_messages(prompt.messages, trajectory.messages)
        record.prompt = write({**msgspec.structs.asdict(prompt), "messages": messages}, "prompt")
    return encode_json(record)


def trajectory_from_line(line: bytes, decode: Decode | None = None) -> Trajectory:
    """The trajectory of one line, its transcript appended again, span by span.

    Args:
        decode: Ids to text, for who prints it.

    Raises:
        msgspec.MsgspecError: The line is no such record.
        TypeError, ValueError: Its prompt lacks messages, or its spans make no transcript.
    """
    record: Any = _decode_line(line)
    for each in (record, *record.segments):
        each.spans = each.spans and _read_spans(each.spans)
    prompt = None
    if (fields := record.prompt) is not None:
        read = {"messages": [*map(_read_media, fields["messages"])]} if "messages" in fields else {}
        prompt = Prompt(**{**fields, **read})
    return unpack_trajectory(
        record, prompt, lambda own: own if decode is None else Messages(own, decode)
    )


def _read_media(message: Any) -> Any:
    """A message of a prompt; one with images or videos as the `Message` that was written."""
    parts = message.get("parts", ()) if isinstance(message, dict) else ()
    if isinstance(parts, list) and any(isinstance(p, dict) and "digest" in p for p in parts):
        with suppress(msgspec.ValidationError):  # a data set may have such a key of its own
            return msgspec.convert(message, Message, strict=False)
    return message


def _write_span(span: Span, decode: Decode | None) -> _SpanLine:
    ids = array("i", span.ids).tolist()
    width, top_ids, top_log_probs = span.top or (1, b"", b"")
    return _SpanLine(
        kind=span.kind,
        ids=ids,
        text=None if decode is None else decode(ids),
        log_probs=array("f", span.log_probs).tolist(),
        versions=list(span.versions),
        finish_reason=span.finish_reason,
        top_ids=np.frombuffer(top_ids, np.int32).reshape(-1, width).tolist(),
        top_log_probs=np.frombuffer(top_log_probs, np.float32).reshape(-1, width).tolist(),
    )


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


def make_floats(metrics: Mapping[str, float]) -> dict[str, float]:
    """Whole numbers are written as the floats that they are read as, and so are bools."""
    return {name: float(value) for name, value in metrics.items()}


def _write(value: Any, where: str, depth: int = 0) -> Any:
    """`value` in builtins, with a text for what JSON cannot hold, of which a warning tells."""
    try:
        made = msgspec.to_builtins(value, enc_hook=_list_array, str_keys=True)
        msgspec.json.encode(_escape(made))
        return made
    except Exception as error:  # whatever a foreign object raises
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.asdict(value)
        if isinstance(value, Mapping) and depth < MAX_DEPTH:
            named = ((key, f"{where}[{key!r}]") for key in value)
            return {str(key): _write(value[key], name, depth + 1) for key, name in named}
        if isinstance(value, list | tuple) and all(isinstance(v, msgspec.Struct) for v in value):
            return [_write(each, f"{where}[{at}]", depth + 1) for at, each in enumerate(value)]
        logger.warning("%s is saved as text: %s", where, error)
        return show_value(value)


def _list_array(value: Any) -> Any:
    """Arrays and tensors as nested lists, their scalars as numbers."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"JSON cannot hold a {type(value).__qualname__}")
    return value.tolist()


def encode_json(record: Any) -> bytes:
    """A record as JSON, with what JSON cannot hold as strings: odd floats, halves of characters."""
    return msgspec.json.encode(_escape(msgspec.to_builtins(record, enc_hook=_list_array)))


def _escape(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {_escape(key): _escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))  # long lists are ids and log-probs
        if kinds <= {int} or (kinds == {float} and all(map(math.isfinite, value))):
            return value
        return [_escape(item) for item in value]
    return value
