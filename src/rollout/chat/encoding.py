"""Rendered text to token ids; what only looks like a special token stays text.

A tokenizer recognises its special tokens by their spelling, wherever they stand. Here a text comes
with the places that its author and not the template wrote: nothing in them is recognised. The text
between two special tokens is encoded as one piece, whichever side wrote which part of it.

A caller with room for so many tokens says so (`most`): a text that certainly has more is refused
before it is encoded, or once its beginning was.
"""

from __future__ import annotations

import itertools
import re
import weakref
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.framing import Framing, framing_of
from rollout.chat.ids import LONG, FastIds, Ids, SlowIds
from rollout.chat.token_bounds import TokenBound, TooManyTokens, token_bound
from rollout.chat.tokenizer_copies import own_copy
from rollout.chat.word_ids import WordIds, word_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from rollout.chat.fast_tokenizer import AnyTokenizer

#: Where text must be kept from being read as special tokens: ``[start, stop)``.
Place = tuple[int, int]

#: The ids of texts that `TextEncoder.encode_batch` has encoded.
Ready = Mapping[str, list[int]]
NOTHING_READY: Ready = MappingProxyType({})
#: Pieces of prompts that are remembered.
_MOST_PIECES = 64
#: Begins and ends the tokens that stand for special ones; of a private plane, so in no text.
BOUNDARY = "\U000f5a17"
#: Markup that some vocabularies (Gemma's) hold as ordinary entries of their table of added tokens.
_MARKUP = re.compile(
    r"</?(?:a|b|i|p|s|u|h[1-6]|t[dhr]|ol|ul|li|em|br|img|sub|sup|code|strong|table|tbody|thead"
    r"|tfoot|caption|blockquote)>"
)


class WrittenText(msgspec.Struct, frozen=True):
    """A rendered text, and the places in it that only look like special tokens.

    Attributes:
        text: As the template wrote it.
        plain: Places that stay plain text, in order, none overlapping another.
        literals, contents: What the text is made of by turns, where that is known: what the
            template wrote, one more of them, and what messages say, in which all is plain.
    """

    text: str
    plain: tuple[Place, ...] = ()
    literals: tuple[str, ...] = ()
    contents: Sequence[str] = ()


class TextEncoder:
    """Text to ids by one tokenizer, no special token added. Get one by `encoder_of`.

    Works on copies of the fast backend: others may set truncation or padding on theirs. A
    tokenizer that transformers runs in Python encodes piece by piece.

    Attributes:
        specials: Spelling and id of each token that a template may write: those marked special,
            and the other added ones that are neither white space nor markup.
    """

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self.specials = {token.content: token_id for token_id, token in added if _is_special(token)}
        self.size = len(added)
        self._added = {token.content: token for _, token in added}
        self._simple = {name for name, token in self._added.items() if _is_simple(token)}
        self._pattern = _any_of(self.specials)
        self._others = _any_of(self._added.keys() - self.specials.keys())
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_normalized = any(token.normalized for token in self._added.values())
        self._normalizes = is_normalized and getattr(backend, "normalizer", None) is not None
        self._backend = backend
        self._ids: Ids
        self._bounded: _BoundedEncoder | None = None
        self._words: WordIds | None = None
        self._library: FastIds | None = None
        if backend is None:
            self._ids = SlowIds(tokenizer)
            self._split_ids = SlowIds(tokenizer, split_special_tokens=True)
        else:
            self._ids = self._library = FastIds(own_copy(backend))
            self._bounded = _BoundedEncoder(backend, self.specials)
            self._words = word_ids(backend, self._bounded.encode_plain)

        self._remembered = lru_cache(_MOST_PIECES)(partial(_packed, self._words))
        self._remembered_words = lru_cache(_MOST_PIECES)(self._packed_words)
        self._framing = lru_cache(_MOST_PIECES)(self._find_framing)

    @property
    def keeps_ascii(self) -> bool:
        """Whether no letter of an ASCII text is changed or left out before it is looked up."""
        return self._words is not None and self._simple == self._added.keys()

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """The ids of a text, special tokens recognised wherever they stand.

        Raises:
            TooManyTokens: They are certainly more than `most`.
        """
        return self.encode_written(WrittenText(text), most)

    def encode_written(
        self,
        written: WrittenText,
        most: int | None = None,
        *,
        is_prompt: bool = False,
        ready: Ready = NOTHING_READY,
    ) -> list[int]:
        """The ids; special tokens are recognised outside the plain places only.

        Args:
            written: What is encoded.
            most: Tokens that there is room for; None for any number.
            is_prompt: Remember what stands between two special tokens: prompts share their heads,
                the system's message and the tools, and those of a group all they have.
            ready: What `encode_batch` has made of its `batch_texts`.

        Raises:
            TooManyTokens: They are certainly more than `most`.
        """
        self.refuse_beyond(most, written.text)
        pieces, tokens = self._split(written)
        if self._words is not None and self._is_divided(written.text, tokens):
            encode = self._remembered if is_prompt else self._words
            bound = most if len(written.text) > LONG else None  # a short text is counted out
            return self._piecewise(pieces, tokens, encode, bound, ready)
        if not written.plain:
            return ready.get(written.text) or self._ids(written.text, most)
        if self._bounded is None or BOUNDARY in written.text:
            return self._piecewise(pieces, tokens, self._encode_plain, most)
        return self._bounded.encode(pieces, [self._added[token] for token in tokens], most)

    def packed(
        self,
        written: WrittenText,
        most: int | None = None,
        *,
        is_prompt: bool = False,
        ready: Ready = NOTHING_READY,
    ) -> array[int]:
        """As `encode_written`; of a text around contents only these are looked at."""
        framing = self._framing(written.literals) if self._is_framed(written) else None
        if framing is not None:
            self.refuse_beyond(most, written.text)
            encode = self._remembered_words if is_prompt else self._packed_words
            ids = framing.packed(written.contents, encode)
            if ids is not None:
                return array("i", ids)
        return array("i", self.encode_written(written, most, is_prompt=is_prompt, ready=ready))

    def _is_framed(self, written: WrittenText) -> bool:
        text = written.text
        if not written.literals or self._words is None or len(text) > LONG or not text.isascii():
            return False
        return self._others is None or self._others.search(text) is None

    def _find_framing(self, literals: tuple[str, ...]) -> Framing | None:
        if self._words is None or self._pattern is None:
            return None
        return framing_of(literals, self.specials, self._pattern, self._simple, self._words)

    def _packed_words(self, text: str) -> bytes:
        assert self._words is not None
        return self._words.packed(text)

    def batch_texts(self, written: WrittenText) -> list[str]:
        """What of it the library must encode, and may do in a batch; nothing of most texts."""
        if written.text.isascii() and self._words is not None:
            return []
        if self._words is not None:
            pieces, tokens = self._split(written)
            if self._is_divided(written.text, tokens):
                return [piece for piece in pieces if self._is_for_library(piece)]
        return [] if written.plain or self._library is None else [written.text]

    def _is_for_library(self, piece: str) -> bool:
        """Whether the library reads no special token in it, not even once it has normalized it."""
        return not (piece.isascii() or self._normalizes) and self.is_plain(piece)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of `batch_texts`; other threads run meanwhile."""
        assert self._library is not None
        return self._library.batch(texts)

    def _is_divided(self, text: str, tokens: Sequence[str]) -> bool:
        """Whether these are all added tokens in it, and texts between them are nobody else's."""
        is_plain = self._others is None or self._others.search(text) is None
        return is_plain and self._simple.issuperset(tokens) and BOUNDARY not in text

    def refuse_beyond(self, most: int | None, text: str) -> None:
        """Raise where the length of `text` says that it has more than `most` tokens.

        Raises:
            TooManyTokens: It has.
        """
        if most is None or len(text) <= most or self._bound is None:
            return
        least = self._bound.least(text, most)
        if least > most:
            raise TooManyTokens(least, most)

    @cached_property
    def _bound(self) -> TokenBound | None:
        return None if self._backend is None else token_bound(self._backend)

    def is_plain(self, text: str) -> bool:
        """Whether nothing in `text` looks like a special token."""
        return self._pattern is None or self._pattern.search(text) is None

    def special_token_spellings(self, text: str, start: int = 0) -> list[Place]:
        """Where `text` would be read as special tokens, moved by `start`."""
        return [(start + a, start + b) for a, b in self._matches(text)]

    def _matches(self, text: str) -> Iterator[Place]:
        if self._pattern is not None:
            yield from (match.span() for match in self._pattern.finditer(text))

    def _split(self, written: WrittenText) -> tuple[list[str], list[str]]:
        """The text around the special tokens that the template wrote, and those tokens."""
        text, ends = written.text, itertools.chain(written.plain, [(len(written.text),) * 2])
        pieces, tokens, at, start = [], [], 0, 0
        for plain_start, plain_stop in ends:
            for a, b in self._matches(text[start:plain_start]):
                pieces.append(text[at : start + a])
                tokens.append(text[start + a : start + b])
                at = start + b
            start = plain_stop
        return [*pieces, text[at:]], tokens

    def _piecewise(
        self,
        pieces: Sequence[str],
        tokens: Sequence[str],
        encode: Callable[[str, int | None], Iterable[int]],
        most: int | None,
        ready: Ready = NOTHING_READY,
    ) -> list[int]:
        ids: list[int] = []
        for piece, token in itertools.zip_longest(pieces, tokens):
            if piece:
                ids += ready.get(piece) or encode(piece, most)
            if token is not None:
                ids.append(self.specials[token])
            if most is not None and len(ids) > most:
                raise TooManyTokens(len(ids), most)
        return ids

    def _encode_plain(self, text: str, most: int | None) -> list[int]:
        if self._bounded is not None:
            return self._bounded.encode_plain(text, most)
        return self._split_ids(text, most)


class _BoundedEncoder:
    """Encodes text whose special tokens have been marked by boundaries of our own.

    Its tokenizer reads every special token of the vocabulary as text, and recognises four made-up
    ones: one for each way in which a special token may take the white space around it.
    """

    def __init__(self, backend: Any, specials: Mapping[str, int]) -> None:
        from tokenizers import AddedToken

        own = own_copy(backend)
        own.add_special_tokens(list(specials))  # known already: they become special, ids stay
        own.encode_special_tokens = True
        self._marks = {
            (left, right): f"{BOUNDARY}{int(left)}{int(right)}{BOUNDARY}"
            for left, right in itertools.product((False, True), repeat=2)
        }
        own.add_tokens(
            [
                AddedToken(name, lstrip=left, rstrip=right, normalized=False, special=False)
                for (left, right), name in self._marks.items()
            ]
        )
        self._plain = FastIds(own)
        self._ids = frozenset(own.token_to_id(name) for name in self._marks.values())
        self._specials = specials

    def encode_plain(self, text: str, most: int | None) -> list[int]:
        """The ids of a text in which nothing is special; boundaries in it are lost."""
        ids = self._plain(text, most)
        return [token_id for token_id in ids if token_id not in self._ids]

    def encode(self, pieces: Sequence[str], tokens: Sequence[Any], most: int | None) -> list[int]:
        """The ids of texts with special tokens between them."""
        marks = [self._marks[token.lstrip, token.rstrip] for token in tokens]
        text = "".join(itertools.chain.from_iterable(zip(pieces, marks, strict=False)))
        written = iter([self._specials[token.content] for token in tokens])
        return [
            next(written) if token_id in self._ids else token_id
            for token_id in self._plain(text + pieces[-1], most)
        ]


#: Encoders are heavy, and several templates may share a tokenizer.
_ENCODERS: weakref.WeakKeyDictionary[Any, TextEncoder] = weakref.WeakKeyDictionary()


def encoder_of(tokenizer: AnyTokenizer) -> TextEncoder:
    """The encoder of a tokenizer, made again where tokens were added since."""
    known = _ENCODERS.get(tokenizer)
    if known is None or known.size != len(tokenizer.added_tokens_decoder):
        known = _ENCODERS[tokenizer] = TextEncoder(tokenizer)
    return known


def _packed(words: WordIds | None, piece: str, most: int | None) -> array[int]:
    assert words is not None
    return array("i", words(piece, most))


def _is_special(token: Any) -> bool:
    is_text = not token.content.strip() or _MARKUP.fullmatch(token.content)
    return bool(token.special or not is_text)


def _is_simple(token: Any) -> bool:
    """Whether it is recognised in any text, and takes no white space with it."""
    return not (token.normalized or token.lstrip or token.rstrip or token.single_word)


def _any_of(words: Collection[str]) -> re.Pattern[str] | None:
    """Matches the longest of `words`; as a tree, so that 1,000 words cost little more than one."""
    if not words:
        return None
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_tree_pattern(tree))


def _tree_pattern(tree: dict[str, Any]) -> str:
    """A regular expression of the words in `tree`; the end of a word is the key ''."""
    head = ""
    while len(tree) == 1 and "" not in tree:
        letter, tree = next(iter(tree.items()))
        head += re.escape(letter)
    branches = [re.escape(letter) + _tree_pattern(rest) for letter, rest in tree.items() if letter]
    if not branches:
        return head
    return f"{head}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
