"""What all formats share: where a turn ends and where its reasoning is."""

from __future__ import annotations

#: Tokens with which models end a turn. They are no content, whatever the tokenizer. Each has its
#: only "<" at the start.
END_TOKENS = frozenset(
    (
        "<|im_end|>",
        "<|endoftext|>",
        "</s>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|user|>",
        "<|observation|>",
        "<end_of_turn>",
        "<eos>",
        "<｜end▁of▁sentence｜>",
    )
)


def without_end(text: str) -> str:
    """`text` without the end tokens and the white space at its end; linear in its length."""
    end = len(text)
    while end:
        if text[end - 1].isspace():
            end -= 1
            continue
        start = text.rfind("<", 0, end)
        if start < 0 or text[start:end] not in END_TOKENS:
            break
        end = start
    return text[:end]
