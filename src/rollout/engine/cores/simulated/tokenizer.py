"""The simulated model's vocabulary as a tokenizer: real driver code runs on it unchanged."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from rollout.chat.tokenizer_parts import BYTE_LETTERS
from rollout.engine.cores.simulated.vocabulary import SPECIAL_TOKENS
from rollout.lazy import importing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Special tokens by their names.
_NAMED = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def simulated_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in which id b is byte b, with ChatML and Hermes tool calls as its template.

    ``<|im_end|>`` ends a turn, ``<|endoftext|>`` pads. Every text encodes without loss, and a text
    of n UTF-8 bytes without special tokens has n ids.
    """
    with importing:
        from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast  # untyped in transformers
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=_backend(),
        bos_token=None,
        chat_template=_chat_template(),
        clean_up_tokenization_spaces=False,
        **_NAMED,
    )
    return tokenizer


def _backend() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return backend


def _chat_template() -> str:
    template = resources.files("rollout.chat") / "templates" / "chatml_hermes.jinja"
    return template.read_text(encoding="utf-8")
