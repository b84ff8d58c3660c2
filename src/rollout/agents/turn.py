"""One turn of a conversation: what the model said, and what answered it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from rollout.types import InvalidToolCall, Message, ToolCall

if TYPE_CHECKING:
    from rollout.tools import ToolResult


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said in one generation, parsed.

    Attributes:
        content: Its text without reasoning, calls and special tokens.
        reasoning: Its reasoning, where the format has any.
        calls: Tool calls and what stood in their place, in order; empty where the turn was cut.
        text: Everything it sampled, decoded, special tokens included.
        cut_by: What ended the generation before the model did: the path of a length
            (``lengths.turn``) or of a deadline (``limits.generation_s``), "abort" or "error";
            else None.
        written: The content with the text of invalid calls where the model wrote it; None where no
            call is invalid.
    """

    content: str
    reasoning: str | None
    calls: tuple[ToolCall | InvalidToolCall, ...]
    text: str
    cut_by: str | None = None
    written: str | None = None


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What the model sampled in one generation, T tokens, not parsed.

    Attributes:
        ids: (T,) int32, packed.
        log_probs: (T,) float32, packed: of each id.
        versions: Runs ``(weight version, number of ids)`` that add up to T.
        finish_reason: "stop" or "length".
        cut_by: As `AssistantTurn.cut_by`.
    """

    ids: array[int]
    log_probs: array[float]
    versions: tuple[tuple[int, int], ...]
    finish_reason: str
    cut_by: str | None = None


def answer(call: ToolCall | InvalidToolCall, result: ToolResult) -> Message:
    """The message that tells the model what became of a call."""
    if isinstance(call, InvalidToolCall):
        return Message(role="tool", content=result.text, extra=result.extra)
    shown = (*result.images, *result.videos)
    return Message(
        role="tool",
        content=result.text,
        name=call.name,
        tool_call_id=call.id or None,
        extra=result.extra,
        parts=(*shown, *filter(None, [result.text])) if shown else (),
    )
