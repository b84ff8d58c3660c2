"""Where the calls of a text open and close, those that a value quotes included."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import re


class Nesting:
    """Where the calls of a text open and close, those that are quoted in a value included.

    A value may quote whole calls, and lone tags of its own format. What is balanced in it is
    quoted; of end tags that nothing opened, the last one closes the value.

    Args:
        text: The turn.
        tags: Finds the tags, in groups ``opens``, ``closes`` and others, which do neither.
    """

    def __init__(self, text: str, tags: re.Pattern[str]) -> None:
        self._text = text
        found = list(tags.finditer(text))
        #: The tags; the first stands for the beginning of the text.
        self.kinds = [None, *(tag.lastgroup for tag in found)]
        self._starts = [tag.start() for tag in found]
        self._stops = [0, *(tag.end() for tag in found)]
        self.depths = [0]
        for kind in self.kinds[1:]:
            self.depths.append(self.depths[-1] + (kind == "opens") - (kind == "closes"))
        #: Of each tag the first of the least depth from it on.
        self._lowest = list(range(len(self.depths)))
        for at in range(len(self.depths) - 2, -1, -1):
            if self.depths[self._lowest[at + 1]] < self.depths[at]:
                self._lowest[at] = self._lowest[at + 1]

    def index(self, at: int) -> int:
        """The last tag before `at`."""
        return bisect_left(self._starts, at)

    def span(self, index: int) -> tuple[int, int]:
        """Where a tag stands."""
        return self._starts[index - 1], self._stops[index]

    def end(self, at: int) -> int | None:
        """The tag that closes what is open at `at`: the last one that nothing after `at` opened."""
        before = self.index(at)
        lowest = self._lowest[before]
        return lowest if self.depths[lowest] < self.depths[before] else None

    def stop(self, at: int) -> int | None:
        """Where what is open at `at` ends; None where nothing closes it."""
        end = self.end(at)
        return None if end is None else self._stops[end]

    def before_calls(self, at: int, call: re.Pattern[str], layout: re.Pattern[str]) -> int | None:
        """Where what is open at `at` ends, if it quotes beginnings of calls and not their ends.

        It ends before calls that reach, one right after the other, to the end of the text. Those
        whose functions it quotes may be quoted as well.

        Args:
            at: A place in a value.
            call: What opens a call and names its function.
            layout: What may stand between calls.
        """
        before, end, stop = self.index(at), len(self.kinds) - 1, len(self._text)
        named: dict[str, int] = {}  # where each function is called first
        for tag in range(before + 1, len(self.kinds)):
            if self.kinds[tag] in ("opens", "empty"):
                named.setdefault(self._name(tag, call), tag)
        found, first, opens = None, len(self.kinds), None
        while end > before and self.kinds[end] in ("closes", "empty"):
            if layout.fullmatch(self._text, self._stops[end], stop) is None:
                break
            if opens is not None and opens <= first:
                found = self._stops[end]
            opens = self._opens(end, before)
            if opens is None:
                break
            first = min(first, named[self._name(opens, call)])
            end, stop = opens - 1, self._starts[opens - 1]
        return found

    def _opens(self, end: int, before: int) -> int | None:
        """The tag after `before` that opens what `end` closes."""
        depth, tag = self.depths[end], end
        while tag > before:
            if self.kinds[tag] in ("opens", "empty") and self.depths[tag - 1] == depth:
                return tag
            tag -= 1
        return None

    def _name(self, tag: int, call: re.Pattern[str]) -> str:
        named = call.match(self._text, self._starts[tag - 1])
        return "" if named is None else named[0].strip()
