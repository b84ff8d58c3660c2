"""Where the text of a turn ends."""

from __future__ import annotations

#: Tokens with which models end a turn.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "</s>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|eot|>",
    "<|eom|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|observation|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<start_function_response>",
    "<eos>",
    "<seed:eos>",
    "[e~[",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)


def strip_stop(text: str, stop_tokens: tuple[str, ...]) -> str:
    """`text` without the one token that ended it, and without white space at its end."""
    text = text.rstrip()
    stop = next((token for token in stop_tokens if text.endswith(token)), "")
    return text.removesuffix(stop).rstrip()
