"""Texts that note what a chat template asks of them.

A template may look at a content in any way: how it begins, how long it is, whether another message
says the same. What it writes is known beforehand for contents of which it learns the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What is asked of a text, and the answer compared.
_ASKED = (
    *("__contains__", "__len__", "count", "endswith", "find", "index", "rfind", "startswith"),
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"),
    *("isnumeric", "isprintable", "isspace", "istitle", "isupper"),
)
#: What makes another text of one. Of those that strip white space it is found by probing.
_CHANGES = (
    *("capitalize", "casefold", "center", "expandtabs", "ljust", "lower", "removeprefix"),
    *("removesuffix", "replace", "rjust", "swapcase", "title", "upper", "zfill"),
)
_STRIPS = ("strip", "lstrip", "rstrip")
#: What nobody can know beforehand of another text.
_LOSES = (
    *("__format__", "__ge__", "__gt__", "__hash__", "__le__", "__lt__", "__mod__"),
    *("__mul__", "__rmul__", "encode", "format", "format_map", "join", "rpartition"),
    *("splitlines", "translate"),
)

#: Methods with their arguments, applied one after the other.
_Steps = tuple[tuple[str, tuple[Any, ...]], ...]


class Looked(NamedTuple):
    """What a template learned of a content.

    Attributes:
        steps: What it made of it before.
        name, args: What it asked then; "" where it may see whether the last step changed anything.
        answer: What it was told.
    """

    steps: _Steps
    name: str
    args: tuple[Any, ...]
    answer: object

    def holds(self, text: str) -> bool:
        """Whether it learns the same of this one."""
        before = text
        for name, args in self.steps:
            before, text = text, _apply(text, name, args)
        if not self.name:
            return (before == text) is self.answer
        try:
            return bool(_apply(text, self.name, self.args) == self.answer)
        except ValueError:  # of `index`
            return False


class Trace:
    """What was learned of one content.

    Attributes:
        looked: In order.
        is_seen: Whether the template came by it at all.
        is_lost: Whether it did with it what nobody can know beforehand of another one.
    """

    def __init__(self) -> None:
        self.looked: list[Looked] = []
        self.is_seen = self.is_lost = False

    def text(self, text: str, steps: _Steps = ()) -> TracedText:
        """A text that is noted here."""
        traced = str.__new__(TracedText, text)
        traced.trace, traced.steps = self, steps
        return traced


class TracedText(str):  # noqa: PLW1641  (its hash is among those of `_LOSES`)
    """A content that notes in a `Trace` what is asked of it, and of what is made of it."""

    trace: Trace
    steps: _Steps

    def __str__(self) -> str:
        self.trace.is_seen = True
        return self

    def __bool__(self) -> bool:
        return self != ""

    def __eq__(self, other: object) -> bool:
        return bool(self._ask("__eq__", other)) if isinstance(other, str) else False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __add__(self, other: str) -> str:
        return self._make("__add__", other)

    def __radd__(self, other: str) -> str:
        return self._make("__radd__", other)

    def __getitem__(self, key: Any) -> str:
        if isinstance(key, slice):
            return self._change("__getitem__", slice(key.start, key.stop, key.step))
        self.trace.is_lost = True  # another one may be too short
        return str.__getitem__(self, key)

    def __iter__(self) -> Iterator[str]:
        def letters() -> Iterator[str]:  # whether there are any says nothing yet
            self.trace.is_lost = True
            yield from str.__iter__(self)

        return letters()

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:
        """Its one part, where it does not hold what would part it."""
        if sep is not None and not self._ask("__contains__", sep):
            return [self]
        self.trace.is_lost = True
        return str.split(self, sep, maxsplit)

    rsplit = split

    def partition(self, sep: str) -> tuple[str, str, str]:
        """The same."""
        if not self._ask("__contains__", sep):
            return self, "", ""
        self.trace.is_lost = True
        return str.partition(self, sep)

    def _ask(self, name: str, *args: Any) -> Any:
        trace, answer = self.trace, _apply(self, name, args)
        trace.is_seen = True
        trace.is_lost |= not _is_plain(args)
        trace.looked.append(Looked(self.steps, name, args, answer))
        return answer

    def _make(self, name: str, *args: Any) -> TracedText:
        trace = self.trace
        trace.is_seen = True
        trace.is_lost |= not _is_plain(args)
        return trace.text(_apply(self, name, args), (*self.steps, (name, args)))

    def _change(self, name: str, *args: Any) -> TracedText:
        made = self._make(name, *args)
        looked = Looked(made.steps, "", (), str.__eq__(self, made))
        self.trace.looked.append(looked)
        return made


def _apply(text: str, name: str, args: tuple[Any, ...]) -> Any:
    if name == "__radd__":
        return str.__add__(args[0], text)
    return getattr(str, name)(text, *args)


def _is_plain(value: object) -> bool:
    """Whether it is what a template says itself, and nothing of a content."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in (str, int, bool, slice, type(None))


def _asking(name: str) -> Callable[..., Any]:
    return lambda text, *args: text._ask(name, *args)


def _changing(name: str) -> Callable[..., Any]:
    return lambda text, *args: text._change(name, *args)


def _stripping(name: str) -> Callable[..., Any]:
    def strip(text: TracedText, characters: Any = None) -> str:
        return text._make(name) if characters is None else text._change(name, characters)

    return strip


def _losing(name: str) -> Callable[..., Any]:
    def lose(text: TracedText, *args: Any, **named: Any) -> Any:
        text.trace.is_seen = text.trace.is_lost = True
        return getattr(str, name)(text, *args, **named)

    return lose


for _made, _names in (
    (_asking, _ASKED),
    (_changing, _CHANGES),
    (_stripping, _STRIPS),
    (_losing, _LOSES),
):
    for _name in _names:
        setattr(TracedText, _name, _made(_name))
