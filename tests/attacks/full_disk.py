"""``rollout run`` on disks that fill up, left alone, interrupted or killed at any moment.

    python full_disk.py DIRECTORY

Prints a line for each run: the size, how it was ended, its exit code, and whether everything that
it said to have kept is there, whole. Where mounting is not permitted, files may not grow past the
size instead.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from rollout import RolloutBatch, load_trajectories

CONFIG = """
from rollout.config import *
from rollout.testing import Scenario

scenario = Scenario(seed=1).reply("", filler={"median": 60, "sigma": 1.0, "max": 800})
config = scenario.timing(base_s=0.002).config(placement=InProcessPlacement())
"""
PROMPTS = 48
MAIN = "from rollout.cli import main; raise SystemExit(main())"
RUN = ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out"]
#: Kilobytes; a run that is left alone needs some 12,000.
SIZES = (16, 120, 400, 2000, 40_000)
ENDS = (None, signal.SIGINT, signal.SIGKILL)


def small_disk(place: Path, kilobytes: int) -> bool:
    """Mount a file system of this size; False where that is not permitted."""
    place.mkdir(exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k"]
    done = subprocess.run(["mount", *options, "none", str(place)], capture_output=True, check=False)
    return done.returncode == 0


def run(folder: Path, end: signal.Signals | None, delay_s: float, size: int | None) -> str:
    bound = (
        ""
        if size is None
        else f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({size}, {size})); "
    )
    process = subprocess.Popen(
        [sys.executable, "-c", bound + MAIN, *RUN],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    errors = process.stderr.readline()  # the engines are being started
    if end is not None:
        time.sleep(delay_s)
        process.send_signal(end)
    errors += process.communicate(timeout=120)[1]
    name = "left" if end is None else end.name
    return f"{name} {process.returncode} {judged(folder / 'out', process.returncode, errors)}"


def judged(out: Path, code: int, errors: str) -> str:
    if "Traceback" in errors:
        return errors
    path, journal = out / "trajectories.jsonl", out / "trajectories.journal"
    # It raises where a line is broken, and reads the journal where nothing was saved.
    rows = load_trajectories(path) if path.exists() or journal.exists() else []
    if len({row.uid for row in rows}) != len(rows):
        return "a trajectory is there twice"
    said = re.search(r"kept is .* with (\d+) of \d+ trajector", errors)
    if said and int(said[1]) != len(rows):
        return f"{said[1]} were said to be kept, {len(rows)} are"
    if code == 4 and not re.search(r"\d bytes are needed and [\d,]+ are free there", errors):
        return f"it says nothing of the room: {errors}"
    if (
        code in (0, 130)
        and (out / "meta.json").exists()
        and len(RolloutBatch.load(out)) != len(rows)
    ):
        return "the batch is not the whole one"
    if code == 0 and len(rows) != PROMPTS:
        return f"{len(rows)} rows are saved"
    aside = [name for name in os.listdir(out) if name.startswith(".saving-")]
    return "something was left aside" if aside and code >= 0 else "whole"


def main(folder: Path) -> None:
    logging.disable()
    dice = random.Random(7)
    (folder / "config.py").write_text(CONFIG)
    lines = [json.dumps({"prompt": f"p{at}", "uid": f"p{at}"}) for at in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    for kilobytes in SIZES:
        for end in ENDS:
            out = folder / "out"
            is_mounted = small_disk(out, kilobytes)
            try:
                size = None if is_mounted else kilobytes * 1024
                print(kilobytes, run(folder, end, dice.uniform(0.1, 2.0), size), flush=True)
            finally:
                if is_mounted:
                    subprocess.run(["umount", str(out)], check=True)
                else:
                    subprocess.run(["rm", "-r", str(out)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
