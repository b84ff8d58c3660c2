"""Rows as turns tell them are the rows that there were, whatever became of a turn."""

from __future__ import annotations

import zlib
from array import array
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from rollout.engine.driver.generation import Generation
from rollout.scheduling.journal.entries import GivenAnswers, Key, TurnEntry
from rollout.scheduling.journal.told_rows import Rows
from rollout.scheduling.journal.trajectory_log import TrajectoryLog
from rollout.token_prefix import TokenPrefix

KEY = Key(0, "uid", 0)
TEXT = st.lists(st.integers(0, 1 << 20), max_size=4)
#: What is added before a turn, its ids, and how many of them stay; None: all.
TURN = st.tuples(st.lists(TEXT, max_size=3), TEXT, st.none() | st.integers(0, 4))


def packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def generation_of(ids: list[int]) -> Generation:
    made = Generation()
    made.recall(packed(ids), array("f", ids).tobytes(), [[0, len(ids)]], "stop")
    return made


class Telling:
    """Tells turns of rows that grow side by side, through a trajectory's log."""

    def __init__(self) -> None:
        self.read = Rows()
        self.admitted = 1 << 30
        self._entries: list[TurnEntry] = []
        journal: Any = SimpleNamespace(writer=self)
        self._log = TrajectoryLog(journal, KEY, None)
        self.row_of = self._log._row_of

    def put(self, entry: TurnEntry) -> int:
        """As the journal's writer."""
        self._entries.append(entry)
        return len(self._entries)

    def tell(self, prefix: TokenPrefix, generation: Generation) -> TurnEntry:
        assert not self._log.note_turn(prefix, 7, "s", 0, generation, 0.0)
        entry = self._entries[-1]
        assert entry.place == (prefix.length, 0, 7)
        entry.answers = GivenAnswers(b"calls", [], 0.0, (), {})
        self.read.add(entry)
        return entry


@given(st.lists(st.tuples(st.integers(0, 1), TURN), max_size=8), st.booleans())
def test_rows_told_by_turns_are_those_that_there_were(turns: list[Any], is_lost: bool) -> None:
    prefixes, telling = (TokenPrefix(), TokenPrefix()), Telling()
    log_probs: tuple[list[bytes], list[bytes]] = ([], [])
    for at, (texts, ids, kept) in turns:
        prefix = prefixes[at]
        for text in texts:
            prefix.extend(packed(text))
        if is_lost:  # tokens that no turn tells of
            prefix.extend(packed([5]))
        generation = generation_of(ids)
        entry = telling.tell(prefix, generation)
        assert entry.place == (len(prefix), zlib.crc32(prefix.packed()), 7)
        stays = None if kept is None or kept >= len(ids) else kept
        generation.kept = stays
        part = generation.kept_part()
        prefix.extend(part.packed()[0])
        log_probs[at].append(part.packed()[1])
        if stays is None:
            assert entry.answers is not None
            after = (len(prefix), zlib.crc32(prefix.packed()), zlib.crc32(b"calls"))
            assert entry.answers.place == after
    for prefix, own in zip(prefixes, log_probs, strict=True):
        prefix.extend(packed([1, 2, 3]))
        row = telling.row_of(prefix)
        told, kept = row.untold()
        if row.turns:
            pieces, found = telling.read.row(row.number, kept)
            assert b"".join([*pieces, *prefix.pieces[told:]]) == prefix.packed()
            assert row.is_cut or found == own
