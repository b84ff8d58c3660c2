"""`rollout run --resume`: where the journal is, and what a resumption must agree with."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from rollout import RolloutBatch
from rollout.cli import main
from rollout.cli.run_journal import JOURNAL

CONFIG = """
from rollout.testing import Scenario

config = Scenario(seed=1).reply("", "at once", filler=5).config(seed=7)
"""
RUN = ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out"]
ELSEWHERE = ["--set", "journal.path=other/run.journal"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text(CONFIG)
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "go"}))
    return tmp_path


def test_run_with_a_journal_elsewhere_is_resumed_from_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*RUN, *ELSEWHERE]) == 0
    [row] = RolloutBatch.load("out").trajectories
    assert main([*RUN, *ELSEWHERE]) == 2
    assert "or --resume to continue the run that left its journal other/run.journal" in (
        capsys.readouterr().err
    )
    assert main([*RUN, *ELSEWHERE, "--resume"]) == 0
    said = capsys.readouterr().out  # what was generated before says nothing about this speed
    assert "s since it was resumed; 1 trainable\n" in said
    assert f" {row.transcript.generated_length} generated, 0 observed\n" in said
    [again] = RolloutBatch.load("out").trajectories
    assert again.metrics == row.metrics


def test_run_overwrites_its_own_journal_however_its_path_is_spelt(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "link").symlink_to("out")
    options = ["--out", "link", "--set", f"journal.path={folder / 'out' / JOURNAL}"]
    assert main([*RUN, *options]) == 0
    assert main([*RUN, *options, "--overwrite"]) == 0
    assert len(RolloutBatch.load("out").trajectories) == 1


def test_run_on_a_journal_elsewhere_is_refused_and_leaves_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = f"other/{JOURNAL}"
    options = ["--set", f"journal.path={path}"]
    assert main([*RUN, *options]) == 0
    before = Path(path).read_bytes()
    for more in (["--overwrite"], ["--out", "another"]):
        assert main([*RUN, *options, *more]) == 2
        assert capsys.readouterr().err.endswith(
            f"journal.path = {path!r}: exists; expected a new file, or --resume to continue the "
            f"run that left it\n"
        )
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize("option", ["--step 3", "--validate"])
def test_resume_of_a_call_with_other_options_is_refused_with_the_difference(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main([*RUN, *option.split()]) == 0
    assert main([*RUN, "--resume"]) == 2
    assert f", {option}' there, 'prompts.jsonl, SHA-256" in capsys.readouterr().err
    assert main([*RUN, *option.split(), "--resume"]) == 0


@pytest.mark.parametrize("option", ["--overwrite", "--resume"])
def test_run_into_the_directory_of_a_run_that_is_under_way_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main(RUN) == 0
    own = folder / "out" / JOURNAL
    before = {each.name: each.read_bytes() for each in (folder / "out").iterdir()}
    with own.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as who writes it has it
        assert main([*RUN, option]) == 2
    assert capsys.readouterr().err.endswith(
        f"journal.path = 'out/{JOURNAL}': cannot be opened: another runtime writes it\n"
    )
    assert {each.name: each.read_bytes() for each in (folder / "out").iterdir()} == before


def test_run_that_overwrites_and_does_not_start_leaves_the_journal_of_before(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(RUN) == 0
    before = (folder / "out" / JOURNAL).read_bytes()
    Path("chat.jinja").write_text("{% if %}")
    assert main([*RUN, "--overwrite", "--set", "model.chat_template=chat.jinja"]) == 2
    assert "starting 1 engine" in capsys.readouterr().err
    assert (folder / "out" / JOURNAL).read_bytes() == before
    assert main([*RUN, "--overwrite"]) == 0
    assert not (folder / "out" / f"{JOURNAL}.before").exists()
    assert main([*RUN, "--resume"]) == 0


def test_run_with_a_journal_in_the_place_of_its_results_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out").mkdir()
    (folder / "link").symlink_to("out")
    path = folder / "link" / "meta.json"
    for option in ("--overwrite", "--resume"):
        path.write_text("precious")
        assert main([*RUN, option, "--set", f"journal.path={path}"]) == 2
        said = (
            f"journal.path = {str(path)!r}: the run's meta.json is written there; expected another"
        )
        assert said in capsys.readouterr().err
        assert path.read_text() == "precious"
