"""Paths where no journal can be."""

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
