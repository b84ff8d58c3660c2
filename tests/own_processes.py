"""Processes that these tests started, reparented ones too, and none of anybody else's."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import psutil

from forked import python_program

#: Inherited by whatever a process starts; one for each process that runs tests.
MARK = "ROLLOUT_TEST_RUN"
os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(8)}"


def marked(mark: str = "") -> list[int]:
    """Processes whose environment has `mark`; without one, those of this run but this process."""
    wanted = (mark or f"{MARK}={os.environ[MARK]}").encode()

    def has_mark(process: Path) -> bool:
        try:
            return wanted in (process / "environ").read_bytes()
        except OSError:
            return False

    running = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [int(path.name) for path in running if has_mark(path) and path.name != str(os.getpid())]


async def kill_and_wait(process: psutil.Process) -> None:
    """Kill a process, and wait until it has ended with all of its threads."""
    process.kill()
    with anyio.fail_after(30), suppress(psutil.NoSuchProcess):
        while process.status() != "zombie" or process.num_threads() > 1:
            await anyio.sleep(0.01)


@contextmanager
def python_process(program: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python program in a session of its own, which ends with it, its forks included."""
    process = python_program(
        program,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
