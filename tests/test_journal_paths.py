"""Paths of journals: where none can be, and when their names are on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout import ConfigError
from test_journal import config_of, prompts, run

EXPECTED = "expected a file, or a new one"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("pipe", f"is no file; {EXPECTED}"),
        ("/dev/null", f"is no file; {EXPECTED}"),
        ("folder", f"is a directory; {EXPECTED}"),
        ("x" * 300, "File name too long"),
        ("~nobody-of-this-name/x", "Could not determine home directory."),
    ],
)
def test_path_where_no_journal_can_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: str, resume: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    with pytest.raises(ConfigError) as refused:
        run(config_of(Path(name)), prompts("quick"), resume=resume)
    assert str(refused.value) == f"journal.path = {name!r}: {fault}"


@pytest.mark.parametrize("fsync", ["never", "batch", "always"])
def test_name_of_a_new_journal_is_on_the_disk_where_its_records_are_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: str
) -> None:
    """Else loss of power may lose the file, with all that was synced in it."""
    sync, synced = os.fsync, set[int]()

    def noted(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    config = config_of(tmp_path / "new" / "journal", journal={"fsync": fsync})
    run(config, prompts("quick"))
    folders = {each.stat().st_ino for each in (tmp_path, tmp_path / "new")}
    assert synced & folders == (set() if fsync == "never" else folders)
