"""Where the text of a turn ends."""

from __future__ import annotations

import re

#: Tokens with which models end a turn. They are no content, whatever the tokenizer.
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

_BACKWARDS = "|".join(re.escape(token[::-1]) for token in END_TOKENS)
_END = re.compile(rf"(?:\s|{_BACKWARDS})*+")
_LONGEST = max(map(len, END_TOKENS))
#: Characters that are looked at first: nearly all turns end within.
_TAIL = 4 * _LONGEST


def without_end(text: str) -> str:
    """`text` without the end tokens and the white space at its end; linear in its length."""
    length = _length_of_end(text[: -_TAIL - 1 : -1])
    if length > _TAIL - _LONGEST:  # what comes before may belong to it
        length = _length_of_end(text[::-1])
    return text[: len(text) - length]


def _length_of_end(backwards: str) -> int:
    end = _END.match(backwards)
    return 0 if end is None else end.end()
