"""Rows as turns tell them: each what came before its ids since the one before, and then these.

So nothing is told twice, and where in a conversation a turn was is known from the turns before it:
nobody sums its ids while it is written.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from rollout.scheduling.journal.entries import TurnEntry
    from rollout.token_prefix import TokenPrefix

#: All tokens of a turn stayed.
ALL = -1


class ToldRow:
    """How much of a row has been written.

    Attributes:
        prefix: Its ids.
        number: Of the row in its trajectory.
        turns: That told of it.
        length: Of its ids, right after the last of these.
        is_cut: Whether not all tokens of one of these stayed.
    """

    __slots__ = ("_last", "_told", "is_cut", "length", "number", "prefix", "turns")

    def __init__(self, prefix: TokenPrefix, number: int) -> None:
        self.prefix, self.number, self.turns = prefix, number, 0
        self.is_cut, self.length = False, 0
        self._told, self._last = 0, b""  # pieces; ids of the last turn

    def tell(self, ids: bytes) -> tuple[int, list[bytes]]:
        """A turn tells of what was `untold`, and then of these ids.

        Returns:
            How many ids of its last turn stayed, or `ALL`; and the pieces since then.
        """
        told, pieces, kept = self._told, self.prefix.pieces, ALL
        if told and (told > len(pieces) or pieces[told - 1] is not self._last):
            told, kept = self.untold()
        self._told, self._last = len(pieces) + (1 if ids else 0), ids
        self.length = self.prefix.length + len(ids) // 4
        self.turns += 1
        return kept, pieces[told:]

    def untold(self) -> tuple[int, int]:
        """Up to which piece it is told, and how many ids of its last turn stayed, or `ALL`."""
        last, told, pieces = self._last, self._told, self.prefix.pieces
        if not last or (told <= len(pieces) and pieces[told - 1] is last):
            return told, ALL
        self.is_cut = True
        if told <= len(pieces) and last.startswith(pieces[told - 1]):
            return told, len(pieces[told - 1]) // 4
        return told - 1, 0


@attrs.define
class _Row:
    pieces: list[bytes] = attrs.field(factory=list)
    log_probs: list[bytes] = attrs.field(factory=list)
    length: int = 0
    digest: int = 0
    #: Both before its last turn.
    before: tuple[int, int] = (0, 0)

    def extend(self, piece: bytes) -> None:
        if piece:
            self.pieces.append(piece)
            self.length += len(piece) // 4
            self.digest = zlib.crc32(piece, self.digest)

    def cut(self, kept: int) -> None:
        """So many ids of its last turn stayed."""
        if kept == ALL:
            return
        ids = self.pieces.pop()
        self.length, self.digest = self.before
        self.extend(ids[: 4 * kept])
        self.log_probs[-1] = self.log_probs[-1][: 4 * kept]


class Rows:
    """Rows as the turns of a trajectory told them."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    @property
    def next_number(self) -> int:
        """Of a row that is not among them."""
        return max(self._rows, default=-1) + 1

    def add(self, turn: TurnEntry) -> None:
        """The next turn; its place is put in, and that of its answers."""
        row = self._rows.setdefault(turn.row, _Row())
        row.cut(turn.kept)
        for piece in turn.context:
            row.extend(piece)
        row.before = row.length, row.digest
        turn.place = (*row.before, turn.place[2])
        row.extend(turn.ids)
        row.log_probs.append(turn.log_probs)
        if turn.answers is not None:
            turn.answers.place = row.length, row.digest, zlib.crc32(turn.answers.asked)

    def row(self, number: int, kept: int) -> tuple[list[bytes], list[bytes]]:
        """The ids and log-probs of one, of whose last turn so many ids stayed."""
        row = self._rows[number]
        row.cut(kept)
        return row.pieces, row.log_probs
