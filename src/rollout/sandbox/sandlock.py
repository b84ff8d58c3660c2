"""Sandboxes of ``sandlock``: Landlock and seccomp, where user namespaces are denied.

Commands see the system's programs read-only and a directory of their own on the disk, have no
network, and cannot signal or trace what is outside. Weaker than bubblewrap: they see that other
processes exist, and their files are on the disk of this machine without a bound.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from typing import TYPE_CHECKING

from rollout.config.sandbox_section import SandboxSpec
from rollout.errors import SandboxError, SandboxUnavailable, SandboxUnsupported
from rollout.sandbox.bubblewrap import _PROBE, MAX_PROCESSES, NOBODY, PATH, drop_root, find_python
from rollout.sandbox.local import LocalSandbox, _find_open_place, read_program, run_host
from rollout.sandbox.remote import import_sdk

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SYSTEM = "/usr /bin /sbin /lib /lib32 /lib64 /libx32 /proc /dev/null /dev/zero /dev/urandom "
_ETC = "/etc/alternatives /etc/ld.so.cache /etc/passwd /etc/group /etc/localtime /etc/mime.types"


class _Sandlock(LocalSandbox):
    async def _host_url(self, url: str) -> str:
        raise SandboxUnsupported(f"{self.id}: no server of this machine can be reached from inside")


class SandlockProvider:
    """Starts sandboxes under sandlock, as nobody where the driver is root.

    Args:
        readable: Further files and directories that commands may read.
        cleanup_s: Seconds that closing a sandbox may take.
    """

    name = "sandlock"
    max_open = 256

    def __init__(self, *, readable: Sequence[str | Path] = (), cleanup_s: float = 10.0) -> None:
        import_sdk(self.name, "sandlock", "sandlock")
        self._python, shown = find_python()
        places = [*_SYSTEM.split(), *_ETC.split(), *shown, *map(str, readable)]
        self._readable = [place for place in places if os.path.exists(place)]
        self._cleanup_s = cleanup_s
        self._count = 0

    async def check(self) -> None:
        """Open a sandbox and try to break out of it; see `SandboxProvider.check`."""
        limit = 8
        program = _PROBE.replace("os.read(0, 1)", "__import__('time').sleep(60)")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            words = {"PORT": listener.getsockname()[1], "LIMIT": limit, "WORKDIR": "'its own'"}
            for word, value in words.items():
                program = program.replace(word, str(value))
            try:
                sandbox = await self.open(SandboxSpec(max_processes=limit))
                try:
                    command = [self._python, "-I", "-S", "-c", program]
                    result = await sandbox.exec(command, timeout_s=60)
                finally:
                    await sandbox.close()
            except SandboxError as error:
                raise SandboxUnavailable(str(error)) from error
        if result.stdout != b"checked\n":
            said = (result.stdout + result.stderr)[-500:].decode(errors="replace").strip()
            raise SandboxUnavailable(f"sandlock does not hold: {said}")

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        """See `SandboxProvider.open`."""
        spec.refuse_unsupported("sandbox provider sandlock", ("memory_mb", "max_processes"))
        directory = tempfile.mkdtemp(prefix="rollout-sandbox-", dir=_find_open_place())
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
        program = read_program("confine")
        wrapper = [sys.executable, "-c", program, json.dumps(confinement), *drop_root()]
        base = {"PATH": PATH, "HOME": directory, "LANG": "C.UTF-8", "TMPDIR": directory}
        settings = {"env": base, "limits": {"CORE": 0}, "remove": directory, "is_confined": True}
        self._count += 1
        number = self._count  # before an await: several are opened at once
        try:
            process = await run_host(wrapper, self._python, settings)
        except SandboxError:
            shutil.rmtree(directory)
            raise
        sandbox = _Sandlock(
            f"sandlock-{os.getpid()}-{number}",
            process,
            workdir=directory,
            env=spec.env,
            cleanup_s=self._cleanup_s,
        )
        await sandbox.begin(spec)
        return sandbox

    async def sweep(self) -> int:
        """See `SandboxProvider.sweep`: a sandbox ends with its driver."""
        return 0

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
