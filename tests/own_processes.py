"""Processes that these tests started, reparented ones too, and none of anybody else's."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

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
