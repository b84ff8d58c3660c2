"""Disks without room: what is finished is kept, and what is not saved is said."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forked import rollout_command
from rollout import Outcome, RolloutBatch, RolloutError, Trajectory, load_trajectories
from rollout.batch import collate
from rollout.batch.storage import FILES, JOURNAL, META, TENSORS, TRAJECTORIES
from rollout.chat import Transcript
from rollout.cli import main
from rollout.cli.exit_codes import NOT_SAVED
from rollout.config import LengthsConfig
from rollout.journal.index import read_journal
from rollout.journal.log_file import HEAD, MAGIC, LogFile, read_frames
from rollout.observe.event_file import EVENTS

pytestmark = pytest.mark.process
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


@pytest.mark.parametrize(("room", "named"), [(1000, TENSORS), (20_000, TRAJECTORIES)])
def test_batch_save_without_room_names_path_need_and_room_and_may_be_called_again(
    tmp_path: Path, room: int, named: str
) -> None:
    earlier = collate([spoken(7)], LENGTHS, 0)
    earlier.save(tmp_path)
    lengths = LengthsConfig(prompt=8, response=200)
    batch = collate([spoken(group, 2) for group in range(60)], lengths, 0)
    if named == TRAJECTORIES:
        batch.tensors = batch.tensors[:1]
    with files_up_to(room), pytest.raises(RolloutError) as caught:
        batch.save(tmp_path, overwrite=True)
    said = str(caught.value)
    path = re.escape(str(tmp_path / named))
    assert re.fullmatch(f"{path} cannot be written: {WHAT_THERE_IS}", said)
    assert _needed(said) > sum(len(sample) for sample in _lines(batch))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((*FILES, META))
    assert RolloutBatch.load(tmp_path).samples == earlier.samples
    batch.save(tmp_path, overwrite=True)
    written = sum((tmp_path / name).stat().st_size for name in FILES)
    assert [row.uid for row in load_trajectories(tmp_path / TRAJECTORIES)][-1] == "p59"
    assert abs(_needed(said) - written) < 1000  # the header of the tensors


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


def test_load_trajectories_names_what_cannot_be_read(tmp_path: Path) -> None:
    collate([spoken(0), spoken(1)], LENGTHS, 0).save(tmp_path)
    (tmp_path / META).unlink()
    path = tmp_path / TRAJECTORIES
    assert [row.uid for row in load_trajectories(path)] == ["p0", "p1"]
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(RolloutError, match="line 1: Object missing required field"):
        load_trajectories(path)
    with pytest.raises(RolloutError, match=r"no\.jsonl cannot be read: No such file"):
        load_trajectories(tmp_path / "no.jsonl")
    with pytest.raises(RolloutError, match=f"rollout.load_trajectories reads {path}$"):
        RolloutBatch.load(tmp_path)


CONFIG = """
from rollout.config import *
from rollout.testing import Scenario

scenario = Scenario(seed=1).reply("quick", filler=60)
scenario = scenario.reply("steady", filler=500).reply("slow", filler=4000)
config = scenario.timing(base_s=BASE_S).config(placement=InProcessPlacement())
"""


def make_frame(record: list[Any]) -> bytes:
    payload = msgspec.msgpack.encode(record)
    return HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def test_journal_with_room_for_some_records_has_those_that_fit(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    file = LogFile(path)
    frames = [make_frame(["record", at, "x" * 90]) for at in range(200)]
    for room in (10, 1000, 5000, 5200, 12_000):
        with files_up_to(room), pytest.raises(OSError, match="File too large"):
            file.append(frames, syncs=True)
        whole = [payload for _, payload in read_frames(path) if payload is not None]
        assert whole == [frame[HEAD.size :] for frame in frames[: len(whole)]]
        assert room < len(MAGIC) + sum(map(len, frames[: len(whole) + 1]))
        os.truncate(path, 0)  # the limit holds for shorter files too
    file.append(frames, syncs=True)
    assert path.read_bytes() == MAGIC + b"".join(frames)
    file.close()


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
    size = (folder / "out" / JOURNAL).stat().st_size
    shutil.rmtree(folder / "out")
    capsys.readouterr()
    with files_up_to(size - 1000):
        assert main(RUN) == NOT_SAVED
    output, errors = capsys.readouterr()
    assert "outcomes  4 completed\n" in output
    assert f"files     out: {JOURNAL}\n" in output
    assert "Traceback" not in errors
    assert errors.count("; events are missing there") <= 1
    warning, lost, error, kept = [
        line
        for line in errors.splitlines()
        if line.startswith(("WARNING", "ERROR", "error", "  ")) and EVENTS not in line
    ]
    assert re.search(
        f"out/{JOURNAL} cannot be written: {WHAT_THERE_IS}; it is tried again", warning
    )
    assert re.search(f"out/{JOURNAL}; .* records are lost: a resumption works again on them", lost)
    assert re.fullmatch(f"error: out/{TENSORS} cannot be written: {WHAT_THERE_IS}", error)
    found = re.fullmatch(
        rf"  kept is out/{JOURNAL} with (\d) of 4 trajectories, as they ended; --resume continues "
        "from it, rollout.load_trajectories reads it",
        kept,
    )
    assert found is not None
    assert 0 < int(found[1]) < 4
    assert [path.name for path in (folder / "out").iterdir()] == [JOURNAL]
    rows = load_trajectories(folder / "out" / JOURNAL)
    assert [row.outcome for row in rows] == [Outcome.COMPLETED] * int(found[1])
    assert [message.role for message in rows[0].messages] == ["user", "assistant"]
    assert rows[0].prompt is not None
    assert main([*RUN, "--resume"]) == 0
    assert len(RolloutBatch.load(folder / "out")) == 4


@contextmanager
def rollout_process(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = rollout_command(
        *arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_cli_run_killed_has_on_disk_what_had_ended(folder: Path) -> None:
    write_config(folder, base_s=0.05)
    write_prompts(folder, ["steady", "quick", "steady", "quick"])
    out = folder / "out"
    with rollout_process(folder, *RUN) as process:
        while process.poll() is None and ended(out) < 2:
            pass
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
    rows = load_trajectories(out / TRAJECTORIES)
    assert sorted(row.uid for row in rows) == ["prompt-1", "prompt-3"]
    assert {row.outcome for row in rows} == {Outcome.COMPLETED}
    with pytest.raises(RolloutError, match=f"rollout.load_trajectories reads {out / JOURNAL}"):
        RolloutBatch.load(out)
    assert main(RUN) == 2  # is not empty
    write_config(folder, base_s=0.01)
    assert main([*RUN, "--resume"]) == 2  # another configuration
    write_config(folder, base_s=0.05)
    assert main([*RUN, "--resume"]) == 0
    batch = RolloutBatch.load(out)
    assert [row.uid for row in batch.samples] == [f"prompt-{at}" for at in range(4)]
    for row in rows:
        same = next(each for each in batch.trajectories if each.uid == row.uid)
        assert same.transcript.ids_bytes() == row.transcript.ids_bytes()
        assert same.transcript.log_probs().tobytes() == row.transcript.log_probs().tobytes()
        assert same.metrics == row.metrics


def ended(out: Path) -> int:
    """Trajectories that the journal there has finished."""
    path = out / JOURNAL
    if not path.exists():
        return 0
    return sum(each.end is not None for each in read_journal(path).trajectories.values())


def test_cli_run_whose_output_cannot_be_written_saves_all_the_same(folder: Path) -> None:
    with (
        Path("/dev/full").open("w") as full,
        rollout_command(*RUN, cwd=folder, stdout=full, stderr=subprocess.PIPE) as process,
    ):
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "Traceback" not in errors
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


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [8, 100, 6000])
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
        assert left in ([], [JOURNAL])
        rows = load_trajectories(out / JOURNAL) if left else []
        said = re.search(r"kept is out/trajectories.journal with (\d+) of 32 trajectories", errors)
        assert len(rows) == (int(said[1]) if said else 0)
        assert len(rows) == 32 or shutil.disk_usage(out).free < 4096  # all, or all that fit
