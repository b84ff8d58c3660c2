"""Text to ids word by word: what a byte-level tokenizer makes of each word is remembered.

Such a tokenizer divides a text into words by regular expressions and encodes each by itself. Most
words of a text have been seen before, and the library spends its time on dividing. Here Python
divides texts that are ASCII, by the tokenizer's own expressions in Python's dialect: at a fifth to
a tenth of the cost. Other texts, and tokenizers that do anything else, are left to the library.
"""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Any

from rollout.chat.ids import LONG
from rollout.chat.tokenizer_parts import byte_letters, parts_of, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rollout.chat.ids import Ids

#: What GPT-2's byte-level pre-tokenizer divides by, where it does so itself.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Expressions of which no match extends past a blank that stands alone between other characters: it
#: can begin a match, and be within one of white space only. As there is no looking back either,
#: such a text is divided at its blanks, and each part by itself.
_DIVIDING_AT_BLANKS = (_GPT2, _QWEN, _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"))
#: Normalizers that leave ASCII as it is.
_LEAVING = ("NFC", "NFD", "NFKC", "NFKD")
#: Unicode's classes within ASCII, as they are written in a class of characters.
_LOWER, _UPPER, _DIGITS = "a-z", "A-Z", "0-9"
_PUNCTUATION, _SYMBOLS = r"!-#%-*,-/:;?@\[-\]_{}", r"$+<->\^`|~"
_CLASSES = {
    "L": _LOWER + _UPPER,
    "Lu": _UPPER,
    "Ll": _LOWER,
    "N": _DIGITS,
    "Nd": _DIGITS,
    "P": _PUNCTUATION,
    "S": _SYMBOLS,
    **dict.fromkeys(("Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "Nl", "No"), ""),
}
#: What an expression is made of outside of classes of characters, and what within. Both dialects
#: mean the same by it where a text is ASCII; there is more that they do not.
_OUTSIDE = re.compile(
    r"\\p\{(?P<name>\w+)\}|(?P<class>\[\^?)"
    r"|(?P<same>\\[sSdDrntfv]|\\[^\w\s]|\(\?(?:i:|:|!|=)|[|)?*+]|\{\d+(?:,\d*)?\}(?!\+)"
    r"|[^\\()^$&.{}\[\]])"
)
_INSIDE = re.compile(
    r"\\p\{(?P<name>\w+)\}|(?P<class>\])|(?P<same>\\[sdrntfv]|\\[^\w\s]|[^\\\[\]&~|]|[&~|](?![&~|]))"
)
#: Longer words are rare, and no dictionary should hold them.
_LONGEST, _MOST_WORDS = 32, 1 << 16
#: Shows whether both divide alike: letters, digits, blanks, line ends, contractions, punctuation.
_PROBES = (
    "It's 3.14159 o'CLOCK, we'LL  see: can't\r\n\r\n\tHelloWorld_v2 [x] ... \n \n  end  ",
    "".join(map(chr, range(128))),
    " 'S'T'RE'VE'M'LL'D's't're've'm'll'd ''' 12 123 1234 a1b2 \x1c\x1d\x1e\x1f\x0b\x0c ",
    'def f(x):\n    return {"k": [1, 22, 333], **x}  # no-op\n\n\nclass A_b(C):\n\tpass\n',
    "//a //AB!x !xY #!/bin/sh $HOME < think>\n\n< /think> http://e.org/?q=1&r=%20 x86_64 \n\n\n x",
)


class WordIds(dict[str, bytes]):
    """Ids of texts of a tokenizer that `word_ids` has looked at; the words seen so far with theirs.

    Args:
        model: The tokenizer's.
        patterns: By which texts, and then the pieces of texts, are divided.
        library: The ids of a text in which no added token is to be found.
        is_divided_at_blanks: Whether the patterns divide at each blank that stands alone.
    """

    def __init__(
        self,
        model: Any,
        patterns: Sequence[re.Pattern[str]],
        library: Ids,
        *,
        is_divided_at_blanks: bool = False,
    ) -> None:
        self._model = model
        self._patterns = patterns
        self._library = library
        self._letters = dict(enumerate(byte_letters()))
        self._is_divided_at_blanks = is_divided_at_blanks
        self._heads = _PartIds(self, "", may_begin_blank=True)
        self._middles = _PartIds(self, " ")
        self._ends = _PartIds(self, " ", may_end_blank=True)

    def __call__(self, text: str, most: int | None = None) -> list[int]:
        """See `Ids`; of a text in which no added token occurs."""
        if len(text) > LONG or not text.isascii():
            return self._library(text, most)
        return array("i", self.packed(text)).tolist()

    def packed(self, text: str) -> bytes:
        """The ids of an ASCII text in which no added token occurs, int32."""
        if self._is_divided_at_blanks and " " in text:
            head, *middles, end = text.split(" ")
            try:
                known = map(self._middles.__getitem__, middles)
                return b"".join([self._heads[head], *known, self._ends[end]])
            except _NotAlone:
                pass
        return self.by_patterns(text)

    def by_patterns(self, text: str) -> bytes:
        """The same, without a look at the blanks."""
        words = [text] if text else []
        for pattern in self._patterns:
            words = _divided(pattern, words)
        return b"".join(map(self.__getitem__, words))

    def __missing__(self, word: str) -> bytes:
        tokens = self._model.tokenize(word.translate(self._letters))
        ids = array("i", [token.id for token in tokens]).tobytes()
        _keep(self, word, ids)
        return ids


class _NotAlone(Exception):
    """A blank stands beside other white space."""


class _PartIds(dict[str, bytes]):
    """Ids of what stands between two blanks that stand alone, or one and an end of the text.

    Args:
        before: The blank, where one stands before the parts.
        may_begin_blank, may_end_blank: Whether they may with white space, where no blank is.
    """

    def __init__(
        self,
        words: WordIds,
        before: str,
        *,
        may_begin_blank: bool = False,
        may_end_blank: bool = False,
    ) -> None:
        self._words, self._before = words, before
        self._may_begin_blank, self._may_end_blank = may_begin_blank, may_end_blank

    def __missing__(self, part: str) -> bytes:
        if not self._may_begin_blank and (not part or part[0].isspace()):
            raise _NotAlone
        if not self._may_end_blank and part[-1:].isspace():
            raise _NotAlone
        ids = self._words.by_patterns(self._before + part)
        _keep(self, part, ids)
        return ids


def _keep(known: dict[str, bytes], word: str, ids: bytes) -> None:
    if len(word) <= _LONGEST:
        if len(known) >= _MOST_WORDS:
            known.clear()
        known[word] = ids


def word_ids(backend: Any, library: Ids) -> WordIds | None:
    """The ids of texts by this tokenizer; None where it does more than divide and look up.

    Args:
        backend: A `tokenizers.Tokenizer`, to be left as it is.
        library: The ids of a text in which no added token is to be found.
    """
    normalizers = parts_of(state_of(backend.normalizer))
    expressions = _expressions(parts_of(state_of(backend.pre_tokenizer)))
    patterns = None if expressions is None else _patterns(expressions)
    is_foreign = type(backend.model).__name__ != "BPE" or backend.model.dropout
    if is_foreign or patterns is None or any(n["type"] not in _LEAVING for n in normalizers):
        return None
    is_divided_at_blanks = expressions is not None and any(
        expressions == [each] for each in _DIVIDING_AT_BLANKS
    )
    ids = WordIds(backend.model, patterns, library, is_divided_at_blanks=is_divided_at_blanks)
    return ids if all(ids(text) == library(text, None) for text in _PROBES) else None


def _expressions(dividers: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """What each part divides by; None where that cannot be said of all of them."""
    expressions: list[str] = []
    is_byte_level = False
    for part in dividers:
        if is_byte_level:
            return None
        match part:
            case {"type": "Digits", "individual_digits": alone}:
                expressions.append(r"\p{N}" if alone else r"\p{N}+")
            case {"type": "Split", "pattern": {"Regex": own}, "behavior": "Isolated"}:
                expressions.append(own)
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": divides}:
                is_byte_level = True
                expressions += [_GPT2] if divides else []
            case _:
                return None
    return expressions if is_byte_level else None


def _patterns(expressions: Sequence[str]) -> list[re.Pattern[str]] | None:
    """The same in Python's dialect; None where one cannot be said in it."""
    try:
        return [_in_ascii(each) for each in expressions]
    except (ValueError, re.error):
        return None


def _in_ascii(expression: str) -> re.Pattern[str]:
    """What means the same to Python, for texts that are ASCII.

    Raises:
        ValueError: It holds what may mean something else.
    """
    pieces: list[str] = []
    at, grammar = 0, _OUTSIDE
    while at < len(expression):
        piece = grammar.match(expression, at)
        name = piece and piece["name"]
        if piece is None or (name and name not in _CLASSES):
            raise ValueError(f"{expression[at:]!r} may mean something else in Python")
        if piece["class"]:
            grammar = _INSIDE if grammar is _OUTSIDE else _OUTSIDE
        letters = _CLASSES[name] if name else piece[0]
        pieces.append(f"[{letters}]" if name and grammar is _OUTSIDE else letters)
        at = piece.end()
    return re.compile("".join(pieces), re.ASCII)


def _divided(pattern: re.Pattern[str], texts: Iterable[str]) -> list[str]:
    words: list[str] = []
    for text in texts:
        found = pattern.findall(text)
        if not found:
            words.append(text)
        elif len("".join(found)) == len(text):
            words += found
        else:
            words += _with_gaps(pattern, text)
    return words


def _with_gaps(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """The matches, and what stands between them."""
    at = 0
    for match in pattern.finditer(text):
        if at < match.start():
            yield text[at : match.start()]
        yield match[0]
        at = match.end()
    if at < len(text):
        yield text[at:]
