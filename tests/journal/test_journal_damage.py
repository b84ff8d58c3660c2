"""A journal with a bad place before its end is refused, and nothing of it is cut off."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rollout
from journal_material import GIVEN, config_of, frames_in, run
from rollout import ConfigError, JournalError
from rollout.journal.index import read_journal
from rollout.journal.log_file import HEAD


def flipped(path: Path, place: int) -> Path:
    """A copy in which a bit of this byte is another one."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    copy = path.with_name(f"flipped-{place}")
    copy.write_bytes(data)
    return copy


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    run(config_of(path), GIVEN)
    return path


def test_journal_with_one_wrong_bit_is_refused_with_the_byte_and_stays_as_it_is(
    path: Path,
) -> None:
    starts = [start for start, _ in frames_in(path)]
    start, stop = starts[2], starts[3]
    for at in (start, start + 4, start + HEAD.size, stop - 1):
        bad = flipped(path, at)
        before = bad.read_bytes()
        fault = re.escape(f"{bad}: is damaged at byte {start}: no whole record begins there")
        with pytest.raises(ConfigError, match=fault) as refused:
            run(config_of(bad), GIVEN, resume=True)
        assert f"(truncate --size={start})" in str(refused.value)
        with pytest.raises(JournalError, match=fault):
            rollout.load_trajectories(bad)
        assert bad.read_bytes() == before
    bad.write_bytes(before[:start])
    assert run(config_of(bad), GIVEN, resume=True).statistics is not None


def test_journal_without_its_header_is_refused_with_the_byte(path: Path) -> None:
    data, starts = path.read_bytes(), [start for start, _ in frames_in(path)]
    path.write_bytes(data[: starts[0]] + data[starts[1] :])
    fault = f"the record at byte {starts[0]}: expected the header first, and once"
    with pytest.raises(ConfigError, match=fault):
        run(config_of(path), GIVEN, resume=True)
    with pytest.raises(JournalError, match=fault):
        rollout.load_trajectories(path)


@pytest.mark.parametrize("tail", [b"\0" * 5000, bytes(range(256)) * 20])
def test_journal_with_bytes_of_no_record_at_its_end_has_a_torn_tail(
    path: Path, tail: bytes
) -> None:
    """As a machine that lost power leaves it."""
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + tail)
    index = read_journal(path)
    assert (index.size, index.torn_size) == (size, len(tail))
    assert run(config_of(path), GIVEN, resume=True).statistics.returned == 3
