"""What a fast tokenizer is made of, and copies of it that others cannot change."""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

#: Bytes that byte-level vocabularies write as themselves; the others, in their order, are written
#: as U+0100 and up.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = itertools.count(0x100)
#: The letter that stands for each byte in byte-level vocabularies (GPT-2's).
BYTE_LETTERS = tuple(chr(byte if byte in _PRINTABLE else next(_OTHERS)) for byte in range(256))
LETTER_BYTES = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
#: How tokenizers that spell what they do not know byte by byte name these tokens.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

#: In UTF-8 the bytes of ASCII, and the first and the other bytes of characters beyond it.
_ASCII, _LEADING, _CONTINUING = range(0x80), range(0xC2, 0xF5), range(0x80, 0xC0)
#: Characters that canonical composition (NFC) makes one of, at most.
COMPOSED = 4
#: Normalizers that make no text shorter; `Strip` only takes white space, which is looked at apart.
_LENGTHENING = ("ByteLevel", "Lowercase", "NFD", "NFKD", "Prepend", "Strip")
#: All that Python takes for white space, which is more than tokenizers do.
_SPACES = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())
#: Pre-tokenizers that only say where texts are divided; others may leave text out.
_DIVIDING = ("ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts")
_DIVIDING_UNLESS_REMOVING = ("Punctuation", "Split")


def read_parts(part: Any) -> list[Mapping[str, Any]]:
    """The settings of a normalizer, pre-tokenizer or decoder, in order; sequences taken apart."""
    return [] if part is None else _flatten(json.loads(part.__getstate__()))


def _flatten(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if state.get("type") != "Sequence":
        return [state]
    names = ("normalizers", "pretokenizers", "decoders")
    inner = next((state[name] for name in names if name in state), ())
    return [part for nested in inner for part in _flatten(nested)]


def spell_token(backend: Any, token_id: int, *, is_byte_level: bool) -> bytes:
    """The bytes that one token adds to a text, which may be a part of a character.

    Args:
        backend: A `tokenizers.Tokenizer`.
        token_id: Of the token; one that no token has adds nothing.
        is_byte_level: Whether the letters of its tokens stand for bytes.
    """
    name: str = backend.id_to_token(token_id) or ""
    if is_byte_level:
        try:
            return bytes([LETTER_BYTES[letter] for letter in name])
        except KeyError:  # an added token, which is written as it is
            return name.encode()
    if _BYTE_TOKEN.fullmatch(name):
        return bytes.fromhex(name[3:5])
    text: str = backend.decode([token_id], skip_special_tokens=False)
    return text.encode(errors="replace")


def copy_tokenizer(backend: Any) -> Any:
    """A tokenizer with the same tokens, which neither cuts nor pads; it shares the vocabulary.

    Others may set truncation or padding, or add tokens, on theirs.

    Args:
        backend: A `tokenizers.Tokenizer`, to be left as it is.
    """
    own = type(backend)(backend.model)  # the model itself: a copy of one takes up to a second
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(own, part, value)
    added = backend.get_added_tokens_decoder()
    own.add_tokens([token for _, token in sorted(added.items())])
    if _describe_added(own) != _describe_added(backend):  # its ids are not those that adding gives
        own = type(backend).from_str(backend.to_str())
        own.no_truncation()
        own.no_padding()
    return own


def _describe_added(backend: Any) -> dict[int, str]:
    return {token_id: repr(token) for token_id, token in backend.get_added_tokens_decoder().items()}


def can_be_split(backend: Any) -> bool:
    """Whether texts between added tokens may be encoded alone, and give the same ids.

    They may not where the tokenizer puts something before a text, or where an added token takes the
    white space around it, depends on its neighbours, or is found in normalized text only.
    """
    normalizer = read_parts(backend.normalizer)
    prepends = any(
        part["type"] == "Prepend"
        or part.get("prepend_scheme", "never") != "never"
        or part.get("add_prefix_space")
        for part in (*normalizer, *read_parts(backend.pre_tokenizer))
    )
    return not prepends and not any(
        token.lstrip or token.rstrip or token.single_word or (token.normalized and normalizer)
        for token in backend.get_added_tokens_decoder().values()
    )


def longest_token(backend: Any) -> tuple[int, str] | None:
    """How many characters one token stands for at most, and which characters leave no token.

    None where tokens may stand for texts of any length, or others than these may be dropped.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    normalizer, divider = read_parts(backend.normalizer), read_parts(backend.pre_tokenizer)
    divides = all(
        part["type"] in _DIVIDING
        or (part["type"] in _DIVIDING_UNLESS_REMOVING and part["behavior"] != "Removed")
        for part in divider
    )
    added = backend.get_added_tokens_decoder().values()
    strips = any(token.lstrip or token.rstrip for token in added)
    strips |= any(part["type"] == "Strip" for part in normalizer)
    is_byte_level = any(part["type"] == "ByteLevel" for part in (*normalizer, *divider))
    dropped = _find_dropped(backend.model, vocabulary, is_byte_level=is_byte_level)
    shrinking = [_find_shrinking(part) for part in normalizer]
    if not divides or dropped is None or 0 in shrinking:
        return None
    if strips:
        dropped = "".join({*dropped, *_SPACES})
    return math.ceil(max(map(len, vocabulary)) * math.prod(shrinking)), dropped


def _find_shrinking(part: Mapping[str, Any]) -> float:
    """Characters that this normalizer makes one of, at most; 0 where there is no bound."""
    if part["type"] == "Replace" and "String" in part["pattern"] and part["content"]:
        return max(1.0, len(part["pattern"]["String"]) / len(part["content"]))
    if part["type"] in ("NFC", "NFKC"):
        return COMPOSED
    return 1 if part["type"] in _LENGTHENING else 0


def _find_dropped(model: Any, vocabulary: Mapping[str, int], *, is_byte_level: bool) -> str | None:
    """The characters that leave no letter in any token; None where that cannot be listed.

    Where a model has no token for a character, it may also make one unknown token of many.
    """
    if type(model).__name__ != "BPE":
        return None
    if not is_byte_level:
        spells_bytes = model.byte_fallback and all(
            f"<0x{byte:02X}>" in vocabulary for byte in range(256)
        )
        return "" if spells_bytes or (model.unk_token is not None and not model.fuse_unk) else None
    known = {byte for byte, letter in enumerate(BYTE_LETTERS) if letter in vocabulary}
    if not (known.issuperset(_LEADING) or known.issuperset(_CONTINUING)):
        return None  # a vocabulary may lack bytes that its makers never saw
    return "".join(chr(byte) for byte in _ASCII if byte not in known)


def match_any(words: Collection[str]) -> re.Pattern[str]:
    """Matches the longest of `words`; as a tree, so that 1,000 words cost little more than one."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_write_pattern(tree) if words else "(?!)")  # which matches nothing


def _write_pattern(tree: dict[str, Any]) -> str:
    """A regular expression of the words in `tree`; the end of a word is the key ''."""
    head = ""
    while len(tree) == 1 and "" not in tree:
        letter, tree = next(iter(tree.items()))
        head += re.escape(letter)
    branches = [re.escape(letter) + _write_pattern(rest) for letter, rest in tree.items() if letter]
    if not branches:
        return head
    return f"{head}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
