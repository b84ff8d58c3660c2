"""Rendered text to token ids; what only looks like a special token stays text.

A tokenizer recognises its special tokens by their spelling, wherever they stand. Here a text comes
with the places that its author and not the template wrote: nothing in them is recognised. The text
is split at the special tokens that the template wrote; each piece between two of them is encoded as
plain text, and remembered by its exact text: the system's message with the tools is encoded once
for thousands of prompts, and a question once for all members of a group.

Where a tokenizer cannot be split so, the whole text is encoded.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
import weakref
from array import array
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.fast_encoding import make_encoder, make_plain_encoder
from rollout.chat.tokenizer_parts import can_be_split, copy_tokenizer, longest_token
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from rollout.chat.fast_encoding import Encode

#: Where text must be kept from being read as special tokens: ``[start, stop)``.
Place = tuple[int, int]

#: Bytes of pieces, texts and ids together, that an encoder remembers, and of one piece at most.
_REMEMBERED, _LARGEST_PIECE = 32 << 20, 1 << 20
#: What an entry of a dict takes beside its text and ids.
_ENTRY = 150
#: Begins and ends the tokens that stand for special ones; of a private plane, so in no text.
_BOUNDARY = "\U000f5a17"
#: Markup that some vocabularies (Gemma's) hold as ordinary entries of their table of added tokens.
_MARKUP = re.compile(
    r"</?(?:a|b|i|p|s|u|h[1-6]|t[dhr]|ol|ul|li|em|br|img|sub|sup|code|strong|table|tbody|thead"
    r"|tfoot|caption|blockquote)>"
)


class TooManyTokens(TemplateError):
    """A text has more tokens than there is room for; known before it was encoded.

    Attributes:
        least: So many tokens it has at least.
    """

    def __init__(self, least: int, max_tokens: int) -> None:
        super().__init__(f"the text has at least {least} tokens; there is room for {max_tokens}")
        self.least = least


class WrittenText(msgspec.Struct, frozen=True):
    """A rendered text, and the places in it that only look like special tokens.

    Attributes:
        text: As the template wrote it.
        plain: Places that stay plain text, in order, none overlapping another.
    """

    text: str
    plain: tuple[Place, ...] = ()


class TextEncoder:
    """Text to ids by one tokenizer, no special token added. Get one by `get_encoder`.

    Works on copies of the fast backend. A tokenizer that transformers runs in Python encodes whole
    texts, and those with plain places piece by piece. Safe to use from several threads.

    Attributes:
        specials: Spelling and id of each token that a template may write: those marked special,
            and the other added ones that are neither white space nor markup.
        added: How many added tokens the tokenizer had.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokens = tokenizer.added_tokens_decoder
        self.specials = {each.content: at for at, each in tokens.items() if _is_special(each)}
        self.added = len(tokens)
        self._pattern = _match_any(self.specials)
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._encode_whole: Encode | None = None
        self._marked: _MarkedTexts | None = None
        if self._backend is None:
            self._encode_whole = partial(_encode_in_python, tokenizer)
            self._piece_ids = _Remembered(
                partial(_encode_in_python, tokenizer, split_special_tokens=True)
            )
            return
        self._piece_ids = _Remembered(make_plain_encoder(self._backend, self.specials))
        if not can_be_split(self._backend):
            self._encode_whole = make_encoder(copy_tokenizer(self._backend))
            self._marked = _MarkedTexts(self._backend, self.specials)

    def encode(self, written: WrittenText | str, max_tokens: int | None = None) -> array[int]:
        """The ids; special tokens are recognised outside the plain places only.

        Args:
            written: What is encoded; in a string, every special token is recognised.
            max_tokens: Tokens that there is room for; None for any number.

        Raises:
            TooManyTokens: They are certainly more than `max_tokens`.
            TemplateError: The text holds half of a character.
        """
        if isinstance(written, str):
            written = WrittenText(written)
        self.refuse_beyond(max_tokens, written.text)
        if self._encode_whole is not None and not written.plain:
            return array("i", self._encode_whole(written.text))
        pieces, tokens = self._split(written)
        if self._marked is not None and _BOUNDARY not in written.text:
            return array("i", self._marked.encode(pieces, tokens))
        ids: array[int] = array("i")
        for piece, token in zip(pieces, (*tokens, None), strict=True):
            if piece:
                ids.frombytes(self._piece_ids(piece))
            if token is not None:
                ids.append(self.specials[token])
        return ids

    def refuse_beyond(self, max_tokens: int | None, text: str) -> None:
        """Raise where the length of `text` says that it has more than `max_tokens` tokens.

        Raises:
            TooManyTokens: It has.
        """
        if max_tokens is None or len(text) <= max_tokens or self._longest is None:
            return
        characters, dropped = self._longest
        if len(text) <= max_tokens * characters:
            return
        least = -(-(len(text) - sum(map(text.count, dropped))) // characters)
        if least > max_tokens:
            raise TooManyTokens(least, max_tokens)

    @cached_property
    def _longest(self) -> tuple[int, str] | None:
        return None if self._backend is None else longest_token(self._backend)

    def is_plain(self, text: str) -> bool:
        """Whether nothing in `text` looks like a special token."""
        return self._pattern is None or self._pattern.search(text) is None

    def special_token_spellings(self, text: str) -> list[Place]:
        """Where `text` would be read as special tokens."""
        found = self._pattern.finditer(text) if self._pattern is not None else ()
        return [match.span() for match in found]

    def _split(self, written: WrittenText) -> tuple[list[str], list[str]]:
        """The text around the special tokens that the template wrote, and those tokens."""
        text, pieces, tokens, at, start = written.text, [], [], 0, 0
        for plain_start, plain_stop in (*written.plain, (len(written.text),) * 2):
            for match in self._find(text, start, plain_start):
                pieces.append(text[at : match.start()])
                tokens.append(match[0])
                at = match.end()
            start = plain_stop
        return [*pieces, text[at:]], tokens

    def _find(self, text: str, start: int, stop: int) -> Iterator[re.Match[str]]:
        return iter(()) if self._pattern is None else self._pattern.finditer(text, start, stop)


class _Remembered:
    """The ids of pieces of text, as bytes; those that were used longest ago are forgotten first."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._lock = threading.Lock()
        self._known: dict[str, bytes] = {}
        self._size = 0

    def __call__(self, piece: str) -> bytes:
        with self._lock:
            ids = self._known.pop(piece, None)
            if ids is not None:
                self._known[piece] = ids  # the last one now
                return ids
        ids = self._encode(piece)
        size = _measure(piece, ids)
        if size <= _LARGEST_PIECE:
            with self._lock:
                self._size += size if piece not in self._known else 0
                self._known[piece] = ids
                while self._size > _REMEMBERED:
                    oldest = next(iter(self._known))
                    self._size -= _measure(oldest, self._known.pop(oldest))
        return ids


def _measure(piece: str, ids: bytes) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(ids) + _ENTRY


class _MarkedTexts:
    """Encodes whole texts whose special tokens are replaced by marks of our own.

    Its tokenizer reads every special token of the vocabulary as text, and recognises four made-up
    ones: one for each way in which a special token may take the white space around it.
    """

    def __init__(self, backend: Any, specials: Mapping[str, int]) -> None:
        from tokenizers import AddedToken

        own = copy_tokenizer(backend)
        own.add_special_tokens(list(specials))  # known already: they become special, ids stay
        own.encode_special_tokens = True
        names = {
            (left, right): f"{_BOUNDARY}{int(left)}{int(right)}{_BOUNDARY}"
            for left, right in itertools.product((False, True), repeat=2)
        }
        own.add_tokens(
            [
                AddedToken(name, lstrip=left, rstrip=right, normalized=False, special=False)
                for (left, right), name in names.items()
            ]
        )
        added = backend.get_added_tokens_decoder().values()
        self._marks = {token.content: names[token.lstrip, token.rstrip] for token in added}
        self._mark_ids = frozenset(own.token_to_id(name) for name in names.values())
        self._encode = make_encoder(own)
        self._specials = specials

    def encode(self, pieces: Sequence[str], tokens: Sequence[str]) -> list[int]:
        """The ids of texts with special tokens between them."""
        marks = [self._marks[token] for token in tokens]
        text = "".join(itertools.chain.from_iterable(zip(pieces, marks, strict=False)))
        special = iter([self._specials[token] for token in tokens])
        return [
            next(special) if token_id in self._mark_ids else token_id
            for token_id in array("i", self._encode(text + pieces[-1]))
        ]


#: Encoders are heavy, and several templates may share a tokenizer.
_ENCODERS: weakref.WeakKeyDictionary[Any, TextEncoder] = weakref.WeakKeyDictionary()


def get_encoder(tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    """The encoder of a tokenizer, made again where tokens were added since."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return TextEncoder(tokenizer)  # which would keep the tokenizer; and it is made at once
    known = _ENCODERS.get(tokenizer)
    if known is None or known.added != len(tokenizer.added_tokens_decoder):
        known = _ENCODERS[tokenizer] = TextEncoder(tokenizer)
    return known


def _encode_in_python(tokenizer: Any, text: str, **options: bool) -> bytes:
    return array("i", tokenizer.encode(text, add_special_tokens=False, **options)).tobytes()


def _is_special(token: Any) -> bool:
    is_text = not token.content.strip() or _MARKUP.fullmatch(token.content)
    return bool(token.special or not is_text)


def _match_any(words: Collection[str]) -> re.Pattern[str] | None:
    """Matches the longest of `words`; as a tree, so that 1,000 words cost little more than one."""
    if not words:
        return None
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_write_pattern(tree))


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
