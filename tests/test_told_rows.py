"""Rows as turns tell them are the rows that there were, whatever became of a turn."""

from __future__ import annotations

import os
import threading
import zlib
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import trio
from hypothesis import given

from rollout.engine.pool.generation import Generation
from rollout.scheduling.journal.entries import AnswersEntry, GivenAnswers, Key, TurnEntry, decode
from rollout.scheduling.journal.frames import Frame, FrameBuffer, frames, records_of
from rollout.scheduling.journal.journal_writer import JournalWriter
from rollout.scheduling.journal.told_rows import Rows
from rollout.scheduling.journal.trajectory_log import TrajectoryLog
from rollout.token_prefix import TokenPrefix
from rollout.tools import ToolResult
from rollout.types import ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

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
        self._log = TrajectoryLog(KEY, journal, journal.writer)
        self.row_of = self._log._row_of

    def put(self, entry: TurnEntry) -> int:
        """As the journal's writer."""
        self._entries.append(entry)
        return len(self._entries)

    def tell(self, prefix: TokenPrefix, generation: Generation) -> TurnEntry:
        assert not self._log.note_turn(prefix, 7, "s", 0, generation, 0.0)
        entry = self._entries[-1]
        assert entry.seed == 7
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


class Noting:
    """A trajectory that is noted in a file; its thread writes when it is told to."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        options: dict[str, Any] = {"syncs": False, "gather_s": 3600.0, "allowance": 1000}
        self.writer = JournalWriter(path, descriptor, 0, **options)
        journal: Any = SimpleNamespace(writer=self.writer)
        self._log = TrajectoryLog(KEY, journal, journal.writer)
        self._prefix = TokenPrefix()
        self._prefix.extend(packed([1, 2]))

    def turn(self) -> None:
        generation = generation_of([3, 4])
        assert not self._log.note_turn(self._prefix, 7, "s", 0, generation, 0.5)
        self._prefix.extend(generation.packed()[0])

    def answers(self) -> None:
        asked = self._log.asked(self._prefix, [ToolCall(name="add", arguments={"a": 1})])
        assert asked is not None
        assert not self._log.note_answers(asked, "s", 1, [ToolResult("6")], 0.25, None)

    def have_written(self) -> None:
        self.writer._signals.put(0.0)


def noted(path: Path, note: Callable[[Noting], None]) -> list[Any]:
    """The records of a file in which this is noted."""

    async def write() -> None:
        noting = Noting(path)
        note(noting)
        await noting.writer.close(20.0)

    trio.run(write)
    found = [each for each in frames(memoryview(path.read_bytes())) if isinstance(each, Frame)]
    return [decode(record) for frame in found for _, record in records_of(frame)]


def test_answers_right_after_a_turn_are_part_of_its_record(tmp_path: Path) -> None:
    def note(noting: Noting) -> None:
        noting.turn()
        noting.answers()

    (turn,) = noted(tmp_path / "journal", note)
    assert isinstance(turn, TurnEntry)
    assert turn.answers is not None
    assert (turn.answers.results, turn.answers.seconds) == (["6"], 0.25)


def test_answers_to_a_turn_that_the_thread_encodes_meanwhile_have_a_record_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_encoding, may_encode, fill = threading.Event(), threading.Event(), FrameBuffer.fill

    def slow_fill(frame: FrameBuffer, records: Any, **options: Any) -> None:
        is_encoding.set()
        may_encode.wait()
        fill(frame, records, **options)

    monkeypatch.setattr(FrameBuffer, "fill", slow_fill)

    def note(noting: Noting) -> None:
        noting.turn()
        noting.have_written()
        is_encoding.wait()
        noting.answers()
        may_encode.set()

    turn, answers = noted(tmp_path / "journal", note)
    assert turn.answers is None
    assert isinstance(answers, AnswersEntry)
    assert (answers.results, answers.place[0]) == (["6"], 4)


def test_thread_encodes_no_record_while_answers_become_part_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_encoding, fill = threading.Event(), FrameBuffer.fill

    def told_fill(frame: FrameBuffer, records: Any, **options: Any) -> None:
        is_encoding.set()
        fill(frame, records, **options)

    monkeypatch.setattr(FrameBuffer, "fill", told_fill)

    def note(noting: Noting) -> None:
        noting.turn()
        noting.writer.is_amending = True  # as in the middle of `note_answers`
        noting.have_written()
        while not noting.writer.sealed:
            pass
        assert not is_encoding.wait(0.05)
        noting.writer.is_amending = False
        is_encoding.wait()

    (turn,) = noted(tmp_path / "journal", note)
    assert isinstance(turn, TurnEntry)
