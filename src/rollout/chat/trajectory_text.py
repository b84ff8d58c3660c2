"""A trajectory for people: which tokens are trained on, and which the model only read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.plurals import count
from rollout.types import Message, Outcome, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rollout.chat.transcript import SpanKind, Transcript

    Decode = Callable[[Sequence[int]], str]

MEANINGS: dict[SpanKind, str] = {
    "prompt": "prompt, not trained",
    "generated": "trained",
    "observation": "observation, not trained",
}
#: A longer prompt is shown by this many characters at either end.
PROMPT_END = 400


def span_texts(transcript: Transcript, decode: Decode) -> Iterator[tuple[SpanKind, int, str]]:
    """Of each span its kind, its tokens and its text; a long prompt without its middle."""
    for span in transcript.spans:
        text = decode(transcript.span_ids(span))
        yield span.kind, len(span), _shorten(text) if span.kind == "prompt" else text


def transcript_text(transcript: Transcript, decode: Decode) -> str:
    """Every span of `transcript`, decoded from its own ids, under headings like ``[trained]``."""
    return "\n".join(
        f"[{MEANINGS[kind]}] {count(length, 'token')}\n{text}"
        for kind, length, text in span_texts(transcript, decode)
    )


def trajectory_text(trajectory: Any) -> str:
    """The transcripts of a `Trajectory`, or its messages where no tokenizer is at hand.

    Never raises.
    """
    try:
        try:
            texts = _segment_texts(trajectory)
        except Exception:  # its tokenizer is not at hand, or cannot be loaded
            texts = []
        if not texts:
            messages = trajectory.messages or getattr(trajectory.prompt, "messages", ())
            texts = list(map(_message_text, messages))
        if trajectory.outcome in (Outcome.FAILED, Outcome.REJECTED):
            reason, cause = trajectory.reason, trajectory.cause
            why = f" ({reason})" if reason else ""
            why += f" {cause.type}: {cause.message}" if cause is not None else ""
            texts.append(f"[{trajectory.outcome}]{why}")
        return "\n".join(texts or [repr(trajectory)])
    except Exception:  # what agents and tools left in it may raise anything
        return repr(trajectory)


def _segment_texts(trajectory: Any) -> list[str]:
    """Those of its segments; none where there are no tokens."""
    texts, segments = list[str](), trajectory.segments
    for at, segment in enumerate(segments):
        if len(segments) > 1:
            parent = segment.parent
            start = "" if parent is None else f", from token {parent[1]} of segment {parent[0]}"
            texts.append(f"[segment {at}: {segment.purpose}{start}]")
        if segment.transcript.spans:
            decode = getattr(segment.messages, "decode", None) or trajectory.messages.decode
            texts.append(transcript_text(segment.transcript, decode))
    return texts if any(map(len, trajectory.transcripts)) else []


def _message_text(message: Any) -> str:
    if isinstance(message, Message):
        message = msgspec.structs.asdict(message)
    content = message.get("content")
    lines = [f"[{message.get('role')}]"]
    if content is not None:
        lines.append(content if isinstance(content, str) else repr(content))
    for call in message.get("tool_calls") or ():
        called = call.get("function", call) if isinstance(call, dict) else call
        if isinstance(called, ToolCall):
            called = {"name": called.name, "arguments": called.arguments}
        lines.append(json.dumps(called, ensure_ascii=False, default=repr))
    return "\n".join(lines)


def _shorten(text: str) -> str:
    left_out = len(text) - 2 * PROMPT_END
    if left_out <= 0:
        return text
    return f"{text[:PROMPT_END]}\n… {left_out:,} characters …\n{text[-PROMPT_END:]}"
