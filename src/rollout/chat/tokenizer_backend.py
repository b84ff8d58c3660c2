"""What the encoder needs of a fast tokenizer: copies of it, facts about it, and its plain codec.

The codec reads nothing in a text as special. `fastokens` encodes several times as fast as
`tokenizers`, on every script. It is an implementation of its own: each vocabulary is tried on a
self-test before it is trusted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from typing import Any

from rollout.utf8 import check_encodable

logger = logging.getLogger("rollout.chat")

#: Text to ids, packed as int32; and ids to text, special tokens spelled out.
Encode = Callable[[str], bytes]
Decode = Callable[[list[int]], str]

#: A text of more characters takes so long that it is encoded in a thread, beside the event loop.
LONG = 16_384
#: Strings of a vocabulary and added tokens that the self-test encodes at most, and how many of them
#: stand in one text.
_STRINGS, _ADDED, _JOINED = 2_048, 256, 8
#: The codec of `fastokens` by the hash of the vocabulary; None where it does not agree.
_TRIED: dict[str, tuple[Encode, Decode] | None] = {}

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

_CODE = (
    'def f(x: int=0) -> "str":\n\treturn f\'{x!r}\' + b"\\x00".hex()  # no\r\n\r\n\r\n'
    'for (let i=0;i<10;i++){ a[i]??=b&&c||!d; }\n<div class="x">&nbsp;</div>\n\n\n   SELECT * '
    '{"city": "Z\\u00fcrich", "t": -12.5e+3, "ok": null}  $x->y::z() #!/bin/sh\n\t\t  \\frac{1}~@^%'
)
_PROSE = (
    "Don't WE'LL they'Re I'm it's 1234567890 3.14 ½ x² №5 Ⅳ ١٢٣ 東京都は日本 한국어 Ελληνικά "
    "ру́сский עִבְרִית العَرَبِيَّة हिन्दी ไทย ﬁn naïve e\u0301 \u1100\u1161\u11a8 "
    "👩\u200d👩\u200d👧\u200d👦 🇨🇭 👍🏽 ☃\ufe0f 𝔘𝔫𝔦 𐍈 🏴\U000e0067\U000e007f"
)
_SPACES = (*" \t\n\r\v\f\x85\xa0\u2003\u2028\u3000", "\r\n")
_STRANGE = tuple("\x00\x1b\u200b\u200d\ufeff\ufffd\uffff\U0010ffff\u0338")


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


def make_encoder(backend: Any) -> Encode:
    """Encodes by `tokenizers`; added tokens are recognised as the tokenizer is set."""

    def encode(text: str) -> bytes:
        try:
            if len(text) > LONG:  # other threads run meanwhile, unlike for one text
                encoding = backend.encode_batch_fast([text], add_special_tokens=False)[0]
            else:
                encoding = backend.encode(text, add_special_tokens=False)
        except TypeError:
            check_encodable(text)
            raise
        return array("i", encoding.ids).tobytes()

    return encode


def open_fastokens(plain: Any) -> tuple[Encode, Decode] | None:
    """The same by `fastokens`; None where it is not installed, or gives other ids or texts."""
    try:
        import fastokens

        state: str = plain.to_str()
        name = hashlib.sha256(state.encode()).hexdigest()
        if name in _TRIED:
            return _TRIED[name]
        tokenizer = fastokens.Tokenizer.from_json_str(state)
    except ImportError:
        _log_once("fastokens is not installed")
        return None
    except Exception as error:  # it does not know such tokenizers
        _log_once(f"fastokens cannot open a tokenizer: {error}")
        return None

    def encode(text: str) -> bytes:
        packed: bytes = tokenizer.encode_batch_flat([text], split_special_tokens=True)[0]
        return packed

    decode = partial(tokenizer.decode, skip_special_tokens=False)
    does_agree = _agree(encode, decode, plain)
    if not does_agree:
        _log_once("fastokens gives other ids, or texts, for a vocabulary")
    return _TRIED.setdefault(name, (encode, decode) if does_agree else None)


@cache
def _log_once(reason: str) -> None:
    logger.info("texts are encoded by tokenizers: %s", reason)


def _agree(fast: Encode, decode: Decode, backend: Any) -> bool:
    """Whether both encode the texts of the self-test alike, and decode their ids alike.

    The last token is also left out, so that ids may end within a character.
    """
    exact = make_encoder(backend)
    try:
        for text in itertools.chain(_list_texts(), _join_vocabulary(backend)):
            packed = exact(text)
            if fast(text) != packed:
                return False
            ids = array("i", packed).tolist()
            for part in (ids, ids[:-1]):
                if decode(part) != backend.decode(part, skip_special_tokens=False):
                    return False
    except Exception:  # it does not take such a text
        return False
    return True


def _list_texts() -> Iterator[str]:
    """Scripts, code, emoji, white space, and mixtures of them."""
    yield from ("", _CODE, _PROSE, *_STRANGE)
    scripts = ["".join(map(chr, range(start, start + 24))) for start in range(0x20, 0xD7E0, 0x80)]
    scripts += ["".join(map(chr, range(at, at + 12))) for at in range(0x1F000, 0x20000, 0x80)]
    yield from scripts
    yield from (space * count for space in _SPACES for count in (1, 2, 3, 7, 33))
    pieces = [*_SPACES, *_STRANGE, *_CODE.split(" "), *_PROSE.split(), *"'\"<|>{}[]0aZé漢🙂\u0301"]
    for step in range(1, len(pieces)):  # each piece after each other one, in some texts
        yield "".join(pieces[at * step % len(pieces)] for at in range(12))


def _join_vocabulary(backend: Any) -> Iterator[str]:
    """Strings of a vocabulary and added tokens, evenly chosen, joined in several ways."""
    size = backend.get_vocab_size(with_added_tokens=False)
    words = [backend.decode([token]) for token in range(0, size, -(-size // _STRINGS))]
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    words += added[:: -(-len(added) // _ADDED) or 1]
    for at, between in zip(range(0, len(words), _JOINED), itertools.cycle(("", " ", "\n", "x"))):
        yield between.join(words[at : at + _JOINED])
