"""Disks without room: what is finished is kept, and what is not saved is said."""

from __future__ import annotations

import json
import logging
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout import Outcome, RolloutBatch, RolloutError, Trajectory
from rollout.batch import collate, load_trajectories
from rollout.batch.storage import FILES, META, TENSORS, TRAJECTORIES
from rollout.batch.trajectory_file import TrajectoryFile
from rollout.chat import Transcript
from rollout.cli import main
from rollout.cli.exit_codes import NOT_SAVED
from rollout.config import LengthsConfig
from rollout.observe.event_file import EVENTS

LENGTHS = LengthsConfig(prompt=8, response=256)
WHAT_THERE_IS = r"File too large; [\d,]+ bytes are needed and [\d,]+ are free there"


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file grows past `size` bytes: as on a full disk, writes end in an error half-way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def spoken(group: int, length: int = 200) -> Trajectory:
    transcript = Transcript()
    transcript.append_prompt([1, 2, 3])
    transcript.append_generated(
        [*range(length)], [-0.5] * length, versions=[(0, length)], finish_reason="stop"
    )
    return Trajectory(
        uid=f"p{group}", group=group, member=0, transcript=transcript, outcome=Outcome.COMPLETED
    )


@pytest.mark.parametrize(
    ("room", "named"), [(0, TENSORS), (1000, TENSORS), (20_000, TRAJECTORIES), (0, "")]
)
def test_batch_save_without_room_names_path_need_and_room_and_may_be_called_again(
    tmp_path: Path, room: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = collate([spoken(7)], LENGTHS, 0)
    earlier.save(tmp_path)
    lengths = LengthsConfig(prompt=8, response=200)
    batch = collate([spoken(group, 2) for group in range(60)], lengths, 0)
    if named == TRAJECTORIES:
        batch.tensors = batch.tensors[:1]
    if not named:
        full = OSError(28, "No space left on device")
        monkeypatch.setattr("tempfile.mkdtemp", _raising(full))
    with files_up_to(room), pytest.raises(RolloutError) as caught:
        batch.save(tmp_path)
    said = str(caught.value)
    what = WHAT_THERE_IS if named else WHAT_THERE_IS.replace("File too large", "No space .*")
    assert re.fullmatch(f"{re.escape(str(tmp_path / named))} cannot be written: {what}", said)
    assert _needed(said) > sum(len(sample) for sample in _lines(batch))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((*FILES, META))
    assert RolloutBatch.load(tmp_path).samples == earlier.samples
    monkeypatch.undo()
    batch.save(tmp_path)
    written = sum((tmp_path / name).stat().st_size for name in FILES)
    assert [row.uid for row in load_trajectories(tmp_path / TRAJECTORIES)][-1] == "p59"
    assert abs(_needed(said) - written) < 1000  # the header of the tensors


def _raising(error: OSError) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def _needed(said: str) -> int:
    found = re.search(r"([\d,]+) bytes are needed", said)
    assert found is not None
    return int(found[1].replace(",", ""))


def _lines(batch: RolloutBatch) -> list[str]:
    return [sample.uid for sample in batch.samples]


def test_batch_files_have_the_mode_of_other_files_of_the_user(tmp_path: Path) -> None:
    collate([spoken(0)], LENGTHS, 0).save(tmp_path)
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_trajectory_file_without_room_keeps_whole_lines_and_goes_on_once_there_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / TRAJECTORIES
    path.write_text("of an earlier batch")
    (tmp_path / META).write_text("{}")
    file = TrajectoryFile(path, replaced=[tmp_path / META])
    assert path.read_text() == "of an earlier batch"
    file.append([spoken(0)])
    assert not (tmp_path / META).exists()
    with files_up_to(2 * path.stat().st_size - 1):
        for group in (1, 2):
            with pytest.raises(RolloutError, match=f"{TRAJECTORIES} cannot be written: File too"):
                file.append([spoken(group)])
        assert [row.uid for row in load_trajectories(path)] == ["p0"]
    assert (file.count, [row.uid for row in file.waiting]) == (1, ["p1", "p2"])
    file.append([spoken(3)])
    file.close()
    assert [row.uid for row in load_trajectories(path)] == ["p0", "p1", "p2", "p3"]
    assert (file.count, len(file.waiting)) == (4, 0)


def test_load_trajectories_leaves_out_a_line_that_was_cut_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / TRAJECTORIES
    file = TrajectoryFile(path)
    file.append([spoken(0), spoken(1)])
    file.close()
    path.write_bytes(path.read_bytes()[:-40])
    with caplog.at_level(logging.WARNING, "rollout.batch"):
        assert [row.uid for row in load_trajectories(path)] == ["p0"]
    assert caplog.messages == [f"{path}, line 2 was cut short and is left out"]
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(RolloutError, match="line 1: Object missing required field"):
        load_trajectories(path)
    with pytest.raises(RolloutError, match=r"no\.jsonl cannot be read: No such file"):
        load_trajectories(tmp_path / "no.jsonl")
    with pytest.raises(RolloutError, match=f"rollout.batch.load_trajectories reads {path}$"):
        RolloutBatch.load(tmp_path)


CONFIG = """
from rollout.config import *
from rollout.testing import Scenario

scenario = Scenario(seed=1).reply("quick", filler=60).reply("slow", filler=4000)
config = scenario.timing(base_s=BASE_S).config(placement=InProcessPlacement())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_config(tmp_path, base_s=0.0)
    write_prompts(tmp_path, ["quick"] * 4)
    return tmp_path


def write_config(folder: Path, *, base_s: float) -> None:
    (folder / "config.py").write_text(CONFIG.replace("BASE_S", str(base_s)))


def write_prompts(folder: Path, texts: list[str]) -> None:
    lines = [json.dumps({"prompt": f"{text} {at}"}) for at, text in enumerate(texts)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))


RUN = ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out"]


def test_cli_run_on_a_full_disk_keeps_what_fits_and_exits_with_a_code_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(RUN) == 0
    lines = (folder / "out" / TRAJECTORIES).read_bytes().splitlines(keepends=True)
    shutil.rmtree(folder / "out")
    capsys.readouterr()
    with files_up_to(sum(map(len, lines)) - len(lines[0]) // 2):
        assert main(RUN) == NOT_SAVED
    output, errors = capsys.readouterr()
    assert "outcomes  4 completed\n" in output
    assert "files     out: trajectories.jsonl\n" in output
    assert "Traceback" not in errors
    warning, error, kept = [
        line
        for line in errors.splitlines()
        if line.startswith(("WARNING", "error", "  ")) and EVENTS not in line
    ]
    assert len(re.findall(f"{EVENTS}: .*; events are missing there", errors)) <= 1
    appended = f"out/{TRAJECTORIES} cannot be written: {WHAT_THERE_IS}"
    assert re.search(f"{appended}; the run continues, and tries again$", warning)
    assert re.fullmatch(f"error: out/{TENSORS} cannot be written: {WHAT_THERE_IS}", error)
    assert kept == (
        f"  kept is out/{TRAJECTORIES} with 3 of 4 trajectories, as they ended; "
        "rollout.batch.load_trajectories reads it"
    )
    assert sorted(path.name for path in (folder / "out").iterdir()) == [EVENTS, TRAJECTORIES]
    rows = load_trajectories(folder / "out" / TRAJECTORIES)
    assert [row.outcome for row in rows] == [Outcome.COMPLETED] * 3


def test_cli_run_overwriting_leaves_the_earlier_batch_until_a_trajectory_has_ended(
    folder: Path,
) -> None:
    assert main(RUN) == 0
    (folder / "broken_core.py").write_text("class Core:\n    pass\n")
    options = ("--set", "engine.kind=custom", "--set", "engine.core=broken_core:Core")
    sys.path.append(str(folder))
    assert main([*RUN, "--overwrite", *options, "--set", "engine.options.size=1"]) == 3
    assert len(RolloutBatch.load(folder / "out")) == 4
    write_prompts(folder, ["quick"])
    assert main([*RUN, "--overwrite"]) == 0
    assert len(RolloutBatch.load(folder / "out")) == 1


@contextmanager
def rollout_process(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    code = "from rollout.cli import main; raise SystemExit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_cli_run_killed_has_on_disk_what_had_ended(folder: Path) -> None:
    write_config(folder, base_s=0.05)
    write_prompts(folder, ["slow", "quick", "slow", "quick"])
    path = folder / "out" / TRAJECTORIES
    with rollout_process(folder, *RUN) as process:
        while process.poll() is None and not (path.exists() and path.read_text().count("\n") == 2):
            pass
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
    rows = load_trajectories(path)
    assert sorted(row.uid for row in rows) == ["prompt-1", "prompt-3"]
    assert {row.outcome for row in rows} == {Outcome.COMPLETED}


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_cli_run_whose_output_cannot_be_written_saves_all_the_same(
    folder: Path, stream: str
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "from rollout.cli import main; raise SystemExit(main())",
                *RUN,
            ],
            cwd=folder,
            text=True,
            check=False,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full},
        )
    assert done.returncode == 0
    assert "Traceback" not in f"{done.stdout}{done.stderr}"
    assert len(RolloutBatch.load(folder / "out")) == 4


@contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[None]:
    """A file system of this size at `place`, where mounting is permitted."""
    place.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.full
@pytest.mark.parametrize("kilobytes", [8, 64, 100, 256, 1500, 6000])
def test_cli_run_on_small_disks_loses_no_line_that_fits(folder: Path, kilobytes: int) -> None:
    write_prompts(folder, ["quick"] * 32)
    out = folder / "out"
    with small_disk(out, kilobytes):
        with rollout_process(folder, *RUN, "--set", "lengths.response=1024") as process:
            output, errors = process.communicate(timeout=120)
        assert "Traceback" not in errors
        assert "outcomes  32 completed" in output
        left = sorted(path.name for path in out.iterdir())
        if process.returncode == 0:
            assert kilobytes >= 1500
            assert len(RolloutBatch.load(out)) == 32
            return
        assert process.returncode == NOT_SAVED
        assert re.search(r"error: out/[a-z.]+ cannot be written: No space left on device; ", errors)
        assert left in ([], [TRAJECTORIES])
        rows = load_trajectories(out / TRAJECTORIES) if left else []
        said = re.search(r"kept is out/trajectories.jsonl with (\d+) of 32 trajectories", errors)
        assert len(rows) == (int(said[1]) if said else 0)
        free = shutil.disk_usage(out).free
        assert len(rows) == 32 or free < 4096 + 2 * (out / TRAJECTORIES).stat().st_size // len(rows)
