"""What a fast tokenizer is made of, and copies of it that others cannot change."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

#: Bytes that byte-level vocabularies write as themselves; the others, in their order, are written
#: as U+0100 and up.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = itertools.count(0x100)
#: The letter that stands for each byte in byte-level vocabularies (GPT-2's).
BYTE_LETTERS = tuple(chr(byte if byte in _PRINTABLE else next(_OTHERS)) for byte in range(256))
LETTER_BYTES = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
#: How tokenizers that spell what they do not know byte by byte name these tokens.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
#: Characters that a normalizer makes one of, at most: canonical composition (NFC) does.
COMPOSED = 4


def read_parts(part: Any) -> list[Mapping[str, Any]]:
    """The settings of a normalizer, pre-tokenizer or decoder; those of a sequence follow it."""
    states = [] if part is None else [json.loads(part.__getstate__())]
    for state in states:  # which grows meanwhile
        for name in ("normalizers", "pretokenizers", "decoders"):
            states += state.get(name, ())
    return states


def spell_token(backend: Any, token_id: int) -> bytes:
    """The bytes that one token adds to a text, which may be a part of a character.

    An id that no token has adds nothing. `backend` is a `tokenizers.Tokenizer`.
    """
    name: str = backend.id_to_token(token_id) or ""
    if {part["type"] for part in read_parts(backend.decoder)} <= {"Sequence", "ByteLevel"}:
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
    """
    own = type(backend)(backend.model)  # the model itself: a copy of one takes up to a second
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(own, part, value)
    added = sorted(backend.get_added_tokens_decoder().items())
    own.add_tokens([token for _, token in added])
    found = sorted(own.get_added_tokens_decoder().items())
    if repr(found) != repr(added):  # its ids are not those that adding gives
        own = type(backend).from_str(backend.to_str())
        own.no_truncation()
        own.no_padding()
    return own


def make_plain_tokenizer(backend: Any, specials: Iterable[str]) -> Any:
    """A copy that reads `specials`, added tokens of it, as text."""
    plain = copy_tokenizer(backend)
    plain.add_special_tokens(list(specials))  # known already: they become special, ids stay
    plain.encode_special_tokens = True
    return plain


def can_be_split(backend: Any) -> bool:
    """Whether texts between added tokens may be encoded alone, and give the same ids.

    They may not where the tokenizer puts something before a text, or where an added token takes the
    white space around it, depends on its neighbours, or is found in normalized text only.
    """
    prepends = any(
        part["type"] == "Prepend"
        or part.get("prepend_scheme", "never") != "never"
        or part.get("add_prefix_space")
        for part in (*read_parts(backend.normalizer), *read_parts(backend.pre_tokenizer))
    )
    is_normalized = backend.normalizer is not None
    return not prepends and not any(
        token.lstrip or token.rstrip or token.single_word or (token.normalized and is_normalized)
        for token in backend.get_added_tokens_decoder().values()
    )


def longest_token(backend: Any) -> int | None:
    """How many characters one token stands for at most; None where it may be any number.

    Characters that a vocabulary cannot spell and drops count as if they were spelled.
    """
    model = backend.model
    if type(model).__name__ != "BPE":  # others make one unknown token of a whole word
        return None
    if model.unk_token is not None and model.fuse_unk and not model.byte_fallback:
        return None
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
    return longest * (1 if backend.normalizer is None else COMPOSED)


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
    branches = [re.escape(letter) + _write_pattern(rest) for letter, rest in tree.items() if letter]
    if len(tree) == 1:
        return "".join(branches)  # none after a word that no other one begins with
    return f"(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
