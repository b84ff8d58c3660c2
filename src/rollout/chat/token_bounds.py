"""How few tokens a text can have, known without encoding it.

A token stands for no more characters than the longest entry of the vocabulary has, unless the
tokenizer drops or merges text on its way there. What a tokenizer does is read from its parts; where
one of them might swallow text without bound, nothing is known.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.tokenizer_parts import byte_letters, parts_of, state_of
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Characters that canonical composition (NFC) makes one of, at most: for each byte of what it
#: makes, and for each character.
COMPOSED_PER_BYTE, COMPOSED_PER_CHARACTER = 1.5, 4
#: All that Python takes for white space, which is more than tokenizers do.
SPACES = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())

#: In UTF-8 the bytes of ASCII, and the first and the other bytes of characters beyond it.
_ASCII, _LEADING, _CONTINUING = range(0x80), range(0xC2, 0xF5), range(0x80, 0xC0)

#: Pre-tokenizers that only say where texts are divided; others may leave text out.
_DIVIDING = ("ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts")
_DIVIDING_UNLESS_REMOVING = ("Punctuation", "Split")
_LENGTHENING = ("ByteLevel", "Lowercase", "NFD", "NFKD", "Prepend")


class TooManyTokens(TemplateError):
    """A text has more tokens than were asked for at most; known before all of it was encoded.

    Attributes:
        least: So many tokens it has at least.
    """

    def __init__(self, least: int, most: int) -> None:
        super().__init__(f"the text has at least {least} tokens; at most {most} were asked for")
        self.least = least


class TokenBound(msgspec.Struct, frozen=True):
    """What is known of a tokenizer.

    Attributes:
        characters: Of a text, that one token stands for at most.
        dropped: Characters that may be left out, however many of them there are.
    """

    characters: int
    dropped: str = ""

    def least(self, text: str, most: int) -> int:
        """Tokens that `text` has at least; looked at no closer where `most` cannot be exceeded."""
        count = len(text)
        if count > most * self.characters:
            for letter in self.dropped:
                count -= text.count(letter)
        return -(-count // self.characters)


def token_bound(backend: Any) -> TokenBound | None:
    """What is known of a fast tokenizer; None where its tokens may stand for texts of any length.

    Args:
        backend: A `tokenizers.Tokenizer`.
    """
    normalizer, divider = state_of(backend.normalizer), state_of(backend.pre_tokenizer)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    is_byte_level = any(_has(part, "ByteLevel") for part in (normalizer, divider))
    unspelt = _unspelt(backend.model, vocabulary, is_byte_level=is_byte_level)
    shrinking = _shrinking(normalizer, is_whole=is_byte_level and not _lacking(vocabulary))
    if shrinking is None or unspelt is None or not _only_divides(divider):
        return None
    added = backend.get_added_tokens_decoder().values()
    drops_spaces = _has(normalizer, "Strip") or any(t.lstrip or t.rstrip for t in added)
    return TokenBound(
        characters=math.ceil(max(map(len, vocabulary)) * shrinking),
        dropped="".join({*unspelt, *SPACES} if drops_spaces else unspelt),
    )


def _has(state: Mapping[str, Any], kind: str) -> bool:
    return any(part["type"] == kind for part in parts_of(state))


def _shrinking(normalizer: Mapping[str, Any], *, is_whole: bool) -> float | None:
    """Characters that one letter of a token may stand for; None where there is no bound.

    Args:
        normalizer: Its state.
        is_whole: Whether tokens hold a letter for each byte.
    """
    factors = [_shrinking_of(part, is_whole=is_whole) for part in parts_of(normalizer)]
    return None if None in factors else math.prod(factor or 1 for factor in factors)


def _shrinking_of(part: Mapping[str, Any], *, is_whole: bool) -> float | None:
    kind = part["type"]
    if kind in _LENGTHENING or kind == "Strip":  # what the latter takes is in `dropped`
        return 1
    if kind in ("NFC", "NFKC"):
        return COMPOSED_PER_BYTE if is_whole else COMPOSED_PER_CHARACTER
    if kind == "Replace" and "String" in part["pattern"] and part["content"]:
        return max(1.0, len(part["pattern"]["String"]) / len(part["content"]))
    return None


def _only_divides(divider: Mapping[str, Any]) -> bool:
    return all(
        part["type"] in _DIVIDING
        or (part["type"] in _DIVIDING_UNLESS_REMOVING and part["behavior"] != "Removed")
        for part in parts_of(divider)
    )


def _unspelt(model: Any, vocabulary: Mapping[str, int], *, is_byte_level: bool) -> str | None:
    """The characters that leave no letter in any token; None where that cannot be listed.

    Where a model has no token for a character, it may also make one unknown token of many.
    """
    kind = type(model).__name__
    if kind == "BPE" and is_byte_level:
        return _unspelt_bytes(vocabulary)
    has_bytes = kind == "BPE" and model.byte_fallback
    if has_bytes and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return ""
    return "" if kind == "BPE" and model.unk_token is not None and not model.fuse_unk else None


def _unspelt_bytes(vocabulary: Mapping[str, int]) -> str | None:
    """The same of a byte-level vocabulary, which may lack bytes that its makers never saw."""
    lacking = _lacking(vocabulary)
    if not lacking.isdisjoint(_LEADING) and not lacking.isdisjoint(_CONTINUING):
        return None
    return "".join(map(chr, sorted(lacking.intersection(_ASCII))))


def _lacking(vocabulary: Mapping[str, int]) -> set[int]:
    """The bytes of UTF-8 that a byte-level vocabulary has no letter for."""
    letters = byte_letters()
    return {b for b in (*_ASCII, *_CONTINUING, *_LEADING) if letters[b] not in vocabulary}
