"""What tests of the sandbox share: which methods there are here, and what is left of a sandbox."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from rollout.tools.sandbox import Isolation, SandboxLimits, SandboxSpec, find_isolation
from rollout.tools.sandbox.sandbox_isolation import bubblewrap_program

#: Above what any test needs that is not about a limit, on a slow machine too.
PATIENT = SandboxLimits(timeout_s=60, cpu_s=60)


async def spec_of(method: Isolation, limits: SandboxLimits = PATIENT) -> SandboxSpec:
    """A sandbox of this method; the test is skipped, with the reason, where it does not hold."""
    spec = SandboxSpec(method="none", limits=limits, bubblewrap=bubblewrap_program())
    report = await find_isolation(method, spec)
    if report.method is None:
        pytest.skip(f"isolation {method!r}: {report.describe()}")
    return msgspec.structs.replace(spec, method=report.method)


def processes_with(token: str) -> list[psutil.Process]:
    """Processes anywhere on this machine, reparented ones too, with this in their command line."""
    found = []
    # Not `process_iter`, which keeps the record of a process whose id another one has by now.
    for pid in psutil.pids():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if pid != os.getpid() and token in " ".join(process.cmdline()):
                found.append(process)
    return found


def directories() -> set[Path]:
    """Directories of sandboxes that use real ones."""
    return set(Path(tempfile.gettempdir()).glob("rollout-sandbox-*"))
