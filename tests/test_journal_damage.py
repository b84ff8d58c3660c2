"""A journal with a bad place before its end: nothing that follows it is lost, and nothing wrong."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

import rollout
from rollout import ConfigError, JournalError
from rollout.scheduling.journal.entries import EndEntry
from rollout.scheduling.journal.frames import (
    MAGIC,
    MARK,
    Damage,
    Frame,
    FrameBuffer,
    TornTail,
    frames,
)
from rollout.scheduling.journal.journal_reading import entries_of as entries_in
from rollout.scheduling.journal.journal_reading import read_journal
from test_journal import GIVEN, config_of, content, run

HEAD = 16


def whole_frames(path: Path) -> list[tuple[int, int]]:
    """Where the frames of a journal begin and end."""
    found = frames(memoryview(path.read_bytes()))
    return [(each.start, each.stop) for each in found if isinstance(each, Frame)]


def flipped(path: Path, *places: int) -> Path:
    """A copy in which a bit of these bytes is another one."""
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 1
    copy = path.with_name(f"flipped-{'-'.join(map(str, places))}")
    copy.write_bytes(data)
    return copy


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    run(config_of(path), GIVEN)
    return path


@pytest.mark.parametrize("at", [0, 3, 4, 8, HEAD, HEAD + 6, -1])
def test_resume_of_a_file_with_one_wrong_bit_is_refused_and_cuts_nothing(
    path: Path, at: int
) -> None:
    places = whole_frames(path)
    start, stop = places[2]
    bad = flipped(path, start + at if at >= 0 else stop + at)
    before = bad.read_bytes()
    with pytest.raises(ConfigError) as refused:
        run(config_of(bad), GIVEN, resume=True)
    assert str(refused.value) == (
        f"journal.path = {str(bad)!r}: {bad}: is damaged: the {stop - start} bytes from byte "
        f"{start} on hold no whole record, and {len(places) - 3} whole frames follow. Nothing is "
        "cut off. Where there is no better copy, rollout.load_trajectories reads what can be "
        f"read, and its first {start} bytes alone can be resumed (truncate --size={start})"
    )
    assert bad.read_bytes() == before
    bad.write_bytes(before[:start])
    assert run(config_of(bad), GIVEN, resume=True).statistics is not None


def test_file_that_is_damaged_in_two_places_names_the_first(path: Path) -> None:
    places = whole_frames(path)
    bad = flipped(path, places[1][0] + HEAD, places[4][0] + HEAD)
    with pytest.raises(JournalError, match=", the first of 2 such places, and") as refused:
        read_journal(bad)
    assert f"{len(places) - 3} whole frames follow" in str(refused.value)
    contents = read_journal(bad, skips_damage=True)
    assert contents.damages == [
        Damage(start, stop - start) for start, stop in (places[1], places[4])
    ]
    assert (contents.size, contents.torn) == (places[-1][1], None)


def test_wrong_bit_in_the_last_frame_is_a_torn_tail(path: Path) -> None:
    start, stop = whole_frames(path)[-1]
    contents = read_journal(flipped(path, stop - 1))
    assert (contents.size, contents.torn) == (start, TornTail(start, stop - start))


def test_load_trajectories_of_a_damaged_file_gives_those_that_are_whole(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = {each.uid: content(each) for each in rollout.load_trajectories(path)}
    given = []
    for start, stop in whole_frames(path)[1:-1]:
        bad = flipped(path, start + HEAD + 2)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rollout.journal"):
            found = rollout.load_trajectories(bad)
        assert caplog.messages[0] == (
            f"{bad}: the {stop - start} bytes from byte {start} on hold no whole record and are "
            "left out, though others follow: the file is damaged there"
        )
        for each in found:
            told, expected = content(each), whole[each.uid]
            if told["prompt"] is None:  # the place that was lost
                told["prompt"] = expected["prompt"]
            assert told == expected
        recorded = read_journal(bad, skips_damage=True).trajectories.values()
        missing = sum(each.end is not None for each in recorded) - len(found)
        left_out = f"{bad}: {missing} finished trajectories are left out: parts are missing"
        assert caplog.messages[1:] == ([left_out] if missing else [])
        given.append(len(found))
    assert {*given} == {1, 2, 3}


def test_load_trajectories_without_the_first_record_is_refused(path: Path) -> None:
    bad = flipped(path, len(MAGIC) + 20)
    with pytest.raises(JournalError, match="its first record, of the run, is lost"):
        rollout.load_trajectories(bad)


def test_frame_that_is_filled_again_has_nothing_of_before() -> None:
    used, new = FrameBuffer(), FrameBuffer()
    for size in (5000, 10, 300):
        used.fill([[2, "a" * size], [2, "b"]], is_whole=True)
    for each in (used, new):
        each.fill([[2, "c" * 200], [2, "d"]])
    assert (used.head, used.payload) == (new.head, new.payload)
    assert (used.count, used.is_whole) == (2, False)
    assert [each.count for each in used.divided()] == [1, 1]
    used.fill([[2, "e"], [2, "f"]], is_whole=True)
    assert used.divided() == [used]


def test_frame_that_is_filled_again_keeps_its_memory() -> None:
    frame = FrameBuffer()
    frame.fill([[2, "a" * 50_000]])
    held = sys.getsizeof(frame.payload)
    frame.fill([[2, "b"]])
    assert sys.getsizeof(frame.payload) == held > len(frame)


def test_frame_after_bytes_that_look_like_many_is_found() -> None:
    buffer = FrameBuffer()
    buffer.fill([[2, "a"]])
    frame = buffer.head + buffer.payload
    # Marks, and what begins like a frame: each place could begin one, and none does.
    ids = MARK * 1000
    likeness = (frame[: HEAD + 1] * 3)[: len(frame) * 2]
    data = memoryview(MAGIC + frame + ids + likeness + frame + b"\0" * 20)
    first, damage, last, torn = frames(data)
    assert isinstance(first, Frame)
    assert isinstance(last, Frame)
    assert damage == Damage(first.stop, len(ids) + len(likeness))
    assert torn == TornTail(last.stop, 20)
    assert bytes(first.payload) == bytes(last.payload) == frame[HEAD:]


def test_ends_of_trajectories_are_in_frames_of_their_own(path: Path) -> None:
    """What the tests above rest on: a damaged frame costs one record."""
    data = memoryview(path.read_bytes())
    found = [entries_in(each) for each in frames(data) if isinstance(each, Frame)]
    assert all(len(each) == 1 for each in found if isinstance(each[0][1], EndEntry))
