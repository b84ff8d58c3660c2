"""Paths of journals: where none can be, and when their names are on the disk."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import rollout
from journal_material import add, config_of, prompts, run
from rollout import ConfigError, RolloutConfig
from rollout.runtime.opening import open_rollout_on
from rollout.scheduling.rewards.functions import GivenRewards
from rollout.testing import run_virtual


class _EnginesStart(Exception):
    pass


def open_without_engines(config: RolloutConfig, *, resume: bool = False) -> None:
    def no_engines(*_: object) -> Any:
        raise _EnginesStart

    async def act() -> None:
        nothing = GivenRewards()
        async with open_rollout_on(no_engines, config, [], nothing, [], resume=resume):
            pass

    run_virtual(act)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("folder", "cannot be written: folder is no file"),
        ("file/journal", "cannot be written: file is no directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_path_where_no_journal_can_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    with pytest.raises(ConfigError) as refused:
        open_without_engines(config_of(Path(name)))
    told = str(refused.value).replace(f"{tmp_path}/", "")
    assert told == f"journal.path = {name!r}: {fault}"


def test_journal_of_another_runtime_is_refused_before_engines_start(tmp_path: Path) -> None:
    config = config_of(tmp_path / "journal")

    async def act() -> None:
        async with rollout.open_rollout(config, [add]):
            await anyio.to_thread.run_sync(partial(open_without_engines, config, resume=True))

    with pytest.raises(ConfigError, match="cannot be opened: another runtime writes it"):
        anyio.run(act, backend="trio")


@pytest.mark.parametrize("there", ["nothing", "empty"])
def test_start_that_fails_leaves_no_new_journal_and_lets_go_of_it(
    tmp_path: Path, there: str
) -> None:
    path = tmp_path / "new" / "journal"
    if there != "nothing":
        path.parent.mkdir()
    if there == "empty":
        path.touch()
    with pytest.raises(_EnginesStart):
        open_without_engines(config_of(path))
    assert path.exists() == (there == "empty")
    assert len(run(config_of(path), prompts("quick")).trajectories) == 1


@pytest.mark.parametrize("fsync", ["never", "batch"])
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


def test_path_of_a_journal_may_begin_with_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run(config_of(Path("~/own.journal")), prompts("quick"))
    assert (tmp_path / "own.journal").exists()
