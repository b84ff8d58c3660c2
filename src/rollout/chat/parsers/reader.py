"""Reading a small syntax forward through a text."""

from __future__ import annotations

import re
from typing import NoReturn

_GAP = re.compile(r"\s*")
_SEPARATORS = {
    end: re.compile(rf"\s*(?P<comma>,\s*)?(?P<end>{re.escape(end)})?") for end in (")", "]", "}")
}


#: Values and calls that are read of one turn, outside JSON. No model writes as many: each takes it
#: two tokens at least.
MAX_VALUES = 50_000


class ReadingBudget:
    """How many more values may be read; shared by all that reads one turn."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_VALUES


class SyntaxFault(ValueError):
    """What stands at `at` is not what the syntax wants there."""

    def __init__(self, reason: str, text: str, at: int) -> None:
        super().__init__(reason)
        self.at = at
        self._text = text

    def __str__(self) -> str:
        seen = self._text[self.at : self.at + 20]
        return f"{self.args[0]}: {seen!r}" if seen else f"{self.args[0]}: the text ends"


class Reader:
    """A position in a text; a reader leaves `at` after what it read.

    Args:
        text: What is read.
        at: Where to begin.
        budget: How many values may be read; one of its own where None.

    Raises:
        SyntaxFault: From all that reads, with the position of the fault.
    """

    def __init__(self, text: str, at: int, budget: ReadingBudget | None = None) -> None:
        self.text = text
        self.at = at
        self.budget = ReadingBudget() if budget is None else budget

    def spend(self) -> None:
        """Count one value."""
        self.budget.left -= 1
        if self.budget.left < 0:
            self.fail(f"more than {MAX_VALUES:,} values in a turn")

    def skip(self) -> int:
        """Go past white space; the position there."""
        if self.text[self.at : self.at + 1].isspace():
            gap = _GAP.match(self.text, self.at)
            self.at = self.at if gap is None else gap.end()
        return self.at

    def take(self, sign: str) -> bool:
        """Whether `sign` stands next, white space aside; if so go past it."""
        if not self.text.startswith(sign, self.at) and not self.text.startswith(sign, self.skip()):
            return False
        self.at += len(sign)
        return True

    def ends(self, end: str) -> bool:
        """Whether `end` stands next, after a comma or not; else there must be a comma."""
        if self.text.startswith(end, self.at):
            self.at += len(end)
            return True
        separator = _SEPARATORS[end].match(self.text, self.at)
        if separator is None or separator.lastgroup is None:
            self.skip()
            self.fail(f"expected , or {end}")
        self.at = separator.end()
        return separator.lastgroup == "end"

    def fail(self, reason: str) -> NoReturn:
        """Raise a fault here, with what stands here."""
        raise SyntaxFault(reason, self.text, self.at)
