"""Text to ids, given up early where there is no room for them.

Encoding takes half a second and a hundred megabytes for a megabyte of text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollout.chat.token_bounds import TooManyTokens
from rollout.utf8 import check_encodable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.chat.fast_tokenizer import AnyTokenizer

#: `ids(text, most)`: those of a text; `TooManyTokens` where they are certainly more than `most`.
Ids = Callable[[str, int | None], list[int]]

#: A text of more characters may take over ten milliseconds to encode.
LONG = 16_384
#: Characters of the beginning that is encoded first, for each token that there is room for: more
#: than tokens have on average.
_PER_TOKEN = 8


class FastIds:
    """Text to ids by a fast tokenizer; other threads run while it encodes a long text.

    Args:
        backend: A `tokenizers.Tokenizer`, to be left as it is.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        # Where a special token is cut, its beginning may be as many words as it has letters.
        self._uncertain = 1 + max((len(token.content) for token in added), default=0)

    def __call__(self, text: str, most: int | None = None) -> list[int]:
        """See `Ids`."""
        ids: list[int]
        if len(text) <= LONG:
            try:
                ids = self._backend.encode(text, add_special_tokens=False).ids
            except TypeError:
                check_encodable(text)
                raise
            return ids
        for beginning in _beginnings(text, most):
            _refuse(self._in_certain_words(beginning), most)
        return self.batch([text])[0]

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Those of several texts; the interpreter lock is released meanwhile, unlike for one."""
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:
            for text in texts:
                check_encodable(text)
            raise
        return [encoding.ids for encoding in encodings]

    def _in_certain_words(self, beginning: str) -> int:
        """Tokens that every text which begins so has as well.

        Texts are divided into words from left to right, and encoded word by word: what follows
        can only change the last ones.
        """
        encoding = self._backend.encode_batch([beginning], add_special_tokens=False)[0]
        last = encoding.token_to_word(len(encoding) - 1) if len(encoding) else None
        if last is None or last <= self._uncertain:
            return 0
        tokens = encoding.word_to_tokens(last - self._uncertain)
        return 0 if tokens is None else int(tokens[0])


class SlowIds:
    """The same by a tokenizer in Python, which does not report its words.

    What follows a text may change how its last word is divided; half of its tokens remain.
    """

    def __init__(self, tokenizer: AnyTokenizer, **options: bool) -> None:
        self._tokenizer = tokenizer
        self._options = options

    def __call__(self, text: str, most: int | None = None) -> list[int]:
        """See `Ids`."""
        for beginning in _beginnings(text, most):
            _refuse(len(self._encoded(beginning)) // 2, most)
        return self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        encode: Any = self._tokenizer.encode
        return list(encode(text, add_special_tokens=False, **self._options))


def _beginnings(text: str, most: int | None) -> Iterator[str]:
    """Ever longer beginnings of a long text, as far as they are much shorter than it is."""
    if most is None:
        return
    length = max(LONG, most * _PER_TOKEN)
    while 2 * length < len(text):
        yield text[:length]
        length *= 4


def _refuse(least: int, most: int | None) -> None:
    if most is not None and least > most:
        raise TooManyTokens(least, most)
