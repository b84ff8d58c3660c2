"""Text for terminals of any width: lines that break between words, and never within one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

#: Columns of output that is no terminal's: it is not wrapped.
PLAIN_WIDTH = 160
#: ``label  text``, as summaries and explanations write it.
_LABEL = re.compile(r"\S+(?: \S+)* {2,}")
#: A longer beginning is no label.
_LONGEST_LABEL = 16
#: Where what a chat template writes, as Python shows it, may be taken apart: before a marker, and
#: after a line's end.
_BETWEEN_MARKERS = re.compile(r"(?=<)|(?<=\\n)(?!\\n)")


def print_line(console: Console, line: str) -> None:
    """Print a line as text, wrapped where the console would otherwise break its words."""
    if console.is_terminal or console.width < PLAIN_WIDTH:
        line = wrapped(line, console.width)
    console.print(line, soft_wrap=True, highlight=False, markup=False)


def wrapped(line: str, width: int) -> str:
    """`line` in lines of at most `width` columns, those after the first below its text.

    A word that is longer stands on a line of its own; one of a template's markers is taken apart
    between them.
    """
    label = _LABEL.match(line)
    indent = label.end() if label and label.end() <= _LONGEST_LABEL else 0
    lines = _lines(line[indent:].split(" "), max(1, width - indent))
    return line[:indent] + ("\n" + " " * indent).join(lines)


def column_widths(rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Widths for the columns of a table that add up to at most `room` and break no word.

    As wide as their texts where these fit; the widest ones give way. None where none suffice.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    least = [max(map(_least, column)) for column in columns]
    while sum(widths) > room:
        able = [at for at, width in enumerate(widths) if width > least[at]]
        if not able:
            return None
        widths[max(able, key=widths.__getitem__)] -= 1
    return widths


def _least(text: str) -> int:
    """Columns that the longest word takes up, or the longest part that it can be taken into."""
    return max((cell_len(piece) for word in text.split() for piece in _pieces(word, 0)), default=0)


def _lines(words: Sequence[str], room: int) -> Iterator[str]:
    line = ""
    for at, word in enumerate(words):
        for number, piece in enumerate(_pieces(word, room)):
            joined = f"{line}{' ' if at and not number else ''}{piece}"
            if line and cell_len(joined) > room:
                yield line
                joined = piece
            line = joined
    yield line


def _pieces(word: str, room: int) -> list[str]:
    if cell_len(word) <= room:
        return [word]
    return [piece for piece in _BETWEEN_MARKERS.split(word) if piece] or [word]
