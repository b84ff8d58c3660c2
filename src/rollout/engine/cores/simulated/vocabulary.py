"""The vocabulary of the simulated model: one id for each byte, and three special tokens.

Id b is byte b. Texts and ids map to each other without loss, no two texts share their ids, and
the ids of a failing test can be decoded by eye.

Loaded in engine processes, where `simulated_tokenizer` is not called: imports the standard library
only.
"""

from __future__ import annotations

import re
from array import array
from importlib import resources
from typing import TYPE_CHECKING, Any

from rollout.lazy import importing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Of the simulated model; see `EngineInfo`.
FINGERPRINT = "simulated"
#: Ids of the special tokens, after the 256 bytes.
SPECIAL_TOKENS = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
EOS_ID = 258
VOCAB_SIZE = 259
#: What opens an assistant's turn in ChatML.
ASSISTANT_HEADER = "<|im_start|>assistant\n"

_PERIOD = 311
_LOG_PROBS = [-(1 + step) / 64 for step in range(_PERIOD)]
_NAME_OF = {token_id & 0xFF: name for name, token_id in SPECIAL_TOKENS.items()}
_SPECIAL = re.compile("(" + "|".join(re.escape(token) for token in SPECIAL_TOKENS) + ")")
_ROLE = ASSISTANT_HEADER.partition("|>")[2].encode()
_IM_START_LOW = SPECIAL_TOKENS["<|im_start|>"] & 0xFF


def encode_text(text: str) -> array[int]:
    """Ids of a text, packed; special tokens are recognised by their spelling."""
    ids = array("i")
    for piece in _SPECIAL.split(text):
        if piece in SPECIAL_TOKENS:
            ids.append(SPECIAL_TOKENS[piece])
        else:
            ids.extend(piece.encode())
    return ids


def decode_ids(ids: array[int] | bytes) -> str:
    """Text of ids, given as an array or packed int32; bytes that are no UTF-8 show as U+FFFD."""
    data = ids if isinstance(ids, bytes) else ids.tobytes()
    low, high = data[::4], data[1::4]  # special tokens are those with a second byte
    pieces: list[str] = []
    at = 0
    while (special := high.find(1, at)) >= 0:
        pieces += (low[at:special].decode(errors="replace"), _NAME_OF[low[special]])
        at = special + 1
    pieces.append(low[at:].decode(errors="replace"))
    return "".join(pieces)


def open_turn_start(data: bytes) -> int | None:
    """Position after the header of the assistant's turn that `data` leaves open, or None."""
    low, high = data[::4], data[1::4]
    last = high.rfind(1)
    end = last + 1 + len(_ROLE)
    is_open = last >= 0 and low[last] == _IM_START_LOW and low[last + 1 : end] == _ROLE
    return end if is_open else None


def expected_log_prob(token_id: int, position: int) -> float:
    """The log-prob that the simulated model gives to an id at an absolute position.

    A multiple of 1/64 in (-5, 0), so float32 holds it exactly; `position` counts the ids before
    it, prompt included. It is made up: its one purpose is that a misplaced value shows.
    """
    return _LOG_PROBS[(token_id * 97 + position * 31) % _PERIOD]


def compute_log_probs(ids: array[int], position: int) -> array[float]:
    """`expected_log_prob` of each of `ids`, the first one at `position`."""
    scaled = enumerate(ids, position)
    return array("f", [_LOG_PROBS[(token * 97 + at * 31) % _PERIOD] for at, token in scaled])


def compute_top(ids: array[int], position: int, count: int) -> tuple[array[int], array[float]]:
    """The `count` most likely ids at the place of each of `ids`, likeliest first, and log-probs.

    As made up as these: the sampled id comes first, then the ids after it, each by 1 less likely.
    """
    likely, log_probs = array("i"), array("f")
    if not count:  # as a rule
        return likely, log_probs
    for token, log_prob in zip(ids, compute_log_probs(ids, position), strict=True):
        likely.extend((token + rank) % VOCAB_SIZE for rank in range(count))
        log_probs.extend(log_prob - rank for rank in range(count))
    return likely, log_probs


def choose_expert(token_id: int, position: int, layer: int, rank: int, count: int) -> int:
    """Which of `count` experts the simulated model routes an id to; others for other ranks."""
    return (token_id * 13 + position * 7 + layer * 3 + rank) % count


def simulated_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in which id b is byte b, with ChatML and Hermes tool calls as its template.

    ``<|im_end|>`` ends a turn, ``<|endoftext|>`` pads. Every text encodes without loss, and a text
    of n UTF-8 bytes without special tokens has n ids.
    """
    with importing:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        from rollout.chat.tokenizer_backend import BYTE_LETTERS

    template = resources.files("rollout.chat") / "templates" / "chatml_hermes.jinja"
    vocabulary = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    make: Any = PreTrainedTokenizerFast  # untyped in transformers
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )
    return tokenizer
