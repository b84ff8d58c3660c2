"""Copies of fast tokenizers: others may set truncation or padding, or add tokens, on theirs."""

from __future__ import annotations

from typing import Any


def own_copy(backend: Any) -> Any:
    """A tokenizer with the same tokens, which neither cuts nor pads; it shares the vocabulary.

    Args:
        backend: A `tokenizers.Tokenizer`, to be left as it is.
    """
    own = type(backend)(backend.model)  # the model itself: a copy of one takes up to a second
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(own, part, value)
    added = backend.get_added_tokens_decoder()
    own.add_tokens([token for _, token in sorted(added.items())])
    if _described(own) != _described(backend):  # its ids are not those that adding gives
        own = type(backend).from_str(backend.to_str())
        own.no_truncation()
        own.no_padding()
    return own


def _described(backend: Any) -> dict[int, str]:
    return {token_id: repr(token) for token_id, token in backend.get_added_tokens_decoder().items()}
