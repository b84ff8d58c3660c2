"""Sandboxes of ``sandlock``: Landlock and seccomp, where user namespaces are denied.

Commands see the system's programs read-only and a directory of their own on the disk, have no
network, and cannot signal or trace what is outside. Weaker than bubblewrap: they see that other
processes exist, and their files are on the disk of this machine without a bound.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING

from rollout.sandbox.bubblewrap import (
    MAX_PROCESSES,
    NOBODY,
    PATH,
    check_walls,
    drop_root,
    find_python,
)
from rollout.sandbox.local import OPEN_DIRECTORY, LocalProvider, LocalSandbox, read_program
from rollout.sandbox.remote import import_sdk

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rollout.config.sandbox_section import SandboxSpec

_SYSTEM = (
    "/usr /bin /sbin /lib /lib32 /lib64 /libx32 /proc /dev/null /dev/zero /dev/urandom "
    "/etc/alternatives /etc/ld.so.cache /etc/passwd /etc/group /etc/localtime /etc/mime.types"
)


class SandlockProvider(LocalProvider):
    """Starts sandboxes under sandlock, as nobody where the driver is root.

    Args:
        readable: Further files and directories that commands may read.
    """

    name = "sandlock"

    def __init__(self, *, readable: Sequence[str | Path] = ()) -> None:
        import_sdk(self.name, "sandlock")
        self._python, shown = find_python()
        paths = [*_SYSTEM.split(), *shown, *map(str, readable)]
        self._readable = [path for path in paths if os.path.exists(path)]

    async def check(self) -> None:
        """See `SandboxProvider.check`."""
        await check_walls(self, self._python)

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        """See `SandboxProvider.open`."""
        spec.refuse_unsupported("sandbox provider sandlock", ("memory_mb", "max_processes"))
        directory = tempfile.mkdtemp(prefix="rollout-sandbox-", dir=OPEN_DIRECTORY)
        if os.geteuid() == 0:
            os.chown(directory, NOBODY, NOBODY)
        confinement = {
            "fs_readable": self._readable,
            "fs_writable": [directory, "/dev/null"],
            "cwd": directory,
            "clean_env": True,
            # With the host.
            "max_processes": (spec.max_processes or MAX_PROCESSES) + 1,
            "max_memory": spec.memory_mb and f"{spec.memory_mb}M",
        }
        words = [sys.executable, "-c", read_program("confine"), json.dumps(confinement)]
        command = [*words, *drop_root(), self._python]
        env = {"PATH": PATH, "HOME": directory, "LANG": "C.UTF-8", "TMPDIR": directory}
        try:  # limits are sandlock's
            return await self._start(
                spec, command, workdir=directory, env=env, max_processes=None, memory_mb=None
            )
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
