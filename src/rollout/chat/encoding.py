"""Text to token ids: the text of a template → pieces between its special tokens → ids.

A `TextEncoder` splits a text at the special tokens that the template wrote, encodes each piece
between two of them as plain text, and remembers the last pieces by their exact text: the system's
message with the tools is encoded once for many prompts, and a question once for a group.

Where a tokenizer cannot be split so, the whole text is encoded.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from array import array
from collections import OrderedDict
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.reasoning import TAGS
from rollout.chat.tokenizer_backend import (
    Decode,
    Encode,
    can_be_split,
    copy_tokenizer,
    longest_token,
    make_encoder,
    match_any,
    open_fastokens,
)
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from transformers import PreTrainedTokenizerBase

#: Where text must be kept from being read as special tokens: ``[start, stop)``.
Place = tuple[int, int]

#: Begins and ends the marks that stand for special tokens; of a private plane, so in no text.
_BOUNDARY = "\U000f5a17"
#: What an encoder's remembered pieces, texts and ids, may take.
_REMEMBERED_BYTES = 16 * 1024 * 1024
#: Markup that some vocabularies (Gemma's) hold as ordinary entries of their table of added tokens.
_MARKUP = re.compile(
    r"</?(?:a|b|i|p|s|u|h[1-6]|t[dhr]|ol|ul|li|em|br|img|sub|sup|code|strong|table|tbody|thead"
    r"|tfoot|caption|blockquote)>"
)
#: What the tags look like that assistants write themselves.
TAG = re.compile(r"</?\w+>")


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


class _PieceCache:
    """The ids of the pieces of text that were encoded last, up to a number of bytes."""

    def __init__(self, encode: Encode) -> None:
        self._encode, self._known, self._size = encode, OrderedDict[str, bytes](), 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> bytes:
        """Return the ids of a piece, remembered or not."""
        with self._lock:
            if (ids := self._known.get(text)) is not None:
                self._known.move_to_end(text)
                return ids
        ids = self._encode(text)  # in a thread it may take long
        with self._lock:
            if self._known.setdefault(text, ids) is ids:
                self._size += _size_piece(text, ids)
            while self._size > _REMEMBERED_BYTES:
                self._size -= _size_piece(*self._known.popitem(last=False))
        return ids


def _size_piece(text: str, ids: bytes) -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids)


class TextEncoder:
    """Text to ids by one tokenizer, no special token added. Get one by `get_encoder`.

    A tokenizer that transformers runs in Python encodes whole texts, and those with plain places
    piece by piece. Safe to use from several threads.

    Attributes:
        specials: Spelling and id of each token that a template may write: those marked special,
            and the other added ones that are neither white space nor markup.
        tags: Those that assistants write themselves, so that their words in a prompt may hold them.
        pattern: Matches each spelling of `specials`, as its only group.
        added: How many added tokens the tokenizer had.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokens = tokenizer.added_tokens_decoder
        self.specials = {each.content: at for at, each in tokens.items() if _is_special(each)}
        own = {t for pair in TAGS for tag in pair for t in self.specials if tag.startswith(t)}
        tags = (each for each in tokens.values() if TAG.fullmatch(each.content))
        self.tags = own | {tag.content for tag in tags if not tag.special}
        self.pattern = re.compile(f"({match_any(self.specials).pattern})")
        self.added = len(tokens)
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._encode_whole: Encode | None = None
        self._encode_marked: Callable[[list[str]], array[int]] | None = None
        if self._backend is None:
            self._decode: Decode = lambda ids: str(
                tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )
            encode = partial(_encode_in_python, tokenizer)
            self._encode_plain: Encode = partial(encode, split_special_tokens=True)
            self._encode_whole = encode
        else:
            self._encode_plain, self._decode = make_plain_codec(self._backend, self.specials)
            if not can_be_split(self._backend):
                self._encode_whole = make_encoder(copy_tokenizer(self._backend))
                self._encode_marked = _make_marked_encoder(self._backend, self.specials)
        self._pieces = _PieceCache(self._encode_plain)

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
        ids, parts = array("i"), self.split(written)
        if self._encode_marked is not None and _BOUNDARY not in written.text:
            return self._encode_marked(parts)
        for at, part in enumerate(parts):
            if at % 2:
                ids.append(self.specials[part])
            elif part:
                ids.frombytes(self._pieces.encode(part))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included."""
        return self._decode(ids.tolist() if isinstance(ids, array) else list(map(int, ids)))

    def refuse_beyond(self, max_tokens: int | None, text: str) -> None:
        """Raise where `text` has more than `max_tokens` tokens, were each the longest there is.

        Raises:
            TooManyTokens: It has.
        """
        if max_tokens is None or len(text) <= max_tokens or self._longest is None:
            return
        least = -(-len(text) // self._longest)
        if least > max_tokens:
            raise TooManyTokens(least, max_tokens)

    @cached_property
    def _longest(self) -> int | None:
        return None if self._backend is None else longest_token(self._backend)

    def split(self, written: WrittenText) -> list[str]:
        """The texts around the special tokens that the template wrote, and those tokens between."""
        text, parts, at, start = written.text, list[str](), 0, 0
        if not written.plain:
            return self.pattern.split(text)
        for plain_start, plain_stop in (*written.plain, (len(text),) * 2):
            for match in self.pattern.finditer(text, start, plain_start):
                parts += (text[at : match.start()], match[0])
                at = match.end()
            start = plain_stop
        return [*parts, text[at:]]


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


def _make_marked_encoder(
    backend: Any, specials: Mapping[str, int]
) -> Callable[[list[str]], array[int]]:
    """Encodes the parts of a text as one, in which marks stand for the special tokens.

    A mark takes the white space around it as its token does.
    """
    from tokenizers import AddedToken

    marked, tokens = _copy_as_plain(backend, specials), backend.get_added_tokens_decoder()
    marks = {name: f"{_BOUNDARY}{name}{_BOUNDARY}" for name in specials}
    added = ((mark, tokens[specials[name]]) for name, mark in marks.items())
    marked.add_tokens(
        [AddedToken(m, lstrip=t.lstrip, rstrip=t.rstrip, normalized=False) for m, t in added]
    )
    special_ids = {marked.token_to_id(mark): specials[name] for name, mark in marks.items()}
    encode = make_encoder(marked)

    def encode_parts(parts: list[str]) -> array[int]:
        text = "".join(marks[part] if at % 2 else part for at, part in enumerate(parts))
        return array("i", [special_ids.get(each, each) for each in array("i", encode(text))])

    return encode_parts


def _copy_as_plain(backend: Any, specials: Iterable[str]) -> Any:
    """A copy that recognises none of `specials`, and all other added tokens."""
    plain = copy_tokenizer(backend)
    plain.add_special_tokens(list(specials))  # known already: they become special, ids stay
    plain.encode_special_tokens = True
    return plain


def make_plain_codec(backend: Any, specials: Iterable[str]) -> tuple[Encode, Decode]:
    """What encodes texts in which none of `specials` is recognised, and what decodes ids.

    All other added tokens are recognised. `backend` is a `tokenizers.Tokenizer`.
    """
    plain = _copy_as_plain(backend, specials)
    exact_encode, fast = make_encoder(plain), open_fastokens(plain)
    exact_decode = partial(plain.decode, skip_special_tokens=False)
    if fast is None:
        return exact_encode, exact_decode
    fast_encode, fast_decode = fast

    def encode(text: str) -> bytes:
        try:
            return fast_encode(text)
        except Exception:  # half of a character, or a limit of its regular expressions
            return exact_encode(text)

    def decode(ids: list[int]) -> str:
        try:
            return fast_decode(ids)
        except Exception:  # an id that it does not know
            return str(exact_decode(ids))

    return encode, decode


def _encode_in_python(tokenizer: Any, text: str, **options: bool) -> bytes:
    return array("i", tokenizer.encode(text, add_special_tokens=False, **options)).tobytes()


def _is_special(token: Any) -> bool:
    is_text = not token.content.strip() or _MARKUP.fullmatch(token.content)
    return bool(token.special or not is_text)
