"""Rows as turns tell them: each what came before its ids since the one before, and then these.

So nothing is told twice, and where in a conversation a turn was is known from the turns before it:
nobody sums its ids while it is written.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import attrs
import msgspec

from rollout.token_prefix import TokenPrefix

if TYPE_CHECKING:
    from rollout.scheduling.journal.entries import TurnEntry

#: All tokens of a turn stayed.
ALL = -1


class ToldRow(msgspec.Struct, eq=False):
    """How much of a row has been written; see `TrajectoryLog.note_turn`.

    Attributes:
        prefix: Its ids.
        number: Of the row in its trajectory.
        turns: That told of it.
        told: Up to which piece it was told then, if all of the last turn stays.
        last: The ids of the last of these turns.
        is_cut: Whether not all tokens of one of these turns stayed.
    """

    prefix: TokenPrefix
    number: int
    turns: int = 0
    told: int = 0
    last: bytes = b""
    is_cut: bool = False

    def untold(self) -> tuple[int, int]:
        """Up to which piece it is told, and how many ids of its last turn stayed, or `ALL`."""
        last, told, pieces = self.last, self.told, self.prefix.pieces
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
        turn.place = (*row.before, turn.seed)
        row.extend(turn.ids)
        row.log_probs.append(turn.log_probs)
        if turn.answers is not None:
            turn.answers.place = row.length, row.digest, zlib.crc32(turn.answers.asked)

    def row(self, number: int, kept: int) -> tuple[list[bytes], list[bytes]]:
        """The ids and log-probs of one, of whose last turn so many ids stayed."""
        row = self._rows[number]
        row.cut(kept)
        return row.pieces, row.log_probs
