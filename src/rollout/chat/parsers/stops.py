"""The token ids with which a tool-call format ends a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollout.chat.parsers.registry import ToolParser


def stop_token_ids(parser: ToolParser, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the parser's `stop_tokens`; tokens that `tokenizer` lacks are left out."""
    known = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    return tuple(known[token] for token in getattr(parser, "stop_tokens", ()) if token in known)
