"""No sandbox: commands run as the driver's user, in a directory of their own.

For trusted code, and where the machine or container is itself the wall. Commands can read and write
what the driver can, and can reach its network. Closing removes the directory and every process that
did not leave by itself, a driver's death too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TYPE_CHECKING

from rollout.sandbox.local import LocalSandbox, compile_host, limits_of, run_host

if TYPE_CHECKING:
    from rollout.config.sandbox_section import SandboxSpec


class _NoSandbox(LocalSandbox):
    async def expose_port(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"


class NoneProvider:
    """Makes directories."""

    name = "none"
    max_open = 256

    def __init__(self, *, cleanup_s: float = 10.0) -> None:
        self._cleanup_s = cleanup_s
        self._count = 0
        self._compiled: bytes | None = None

    async def check(self) -> None:
        """See `SandboxProvider.check`: there is nothing to lack."""

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        """See `SandboxProvider.open`."""
        spec.refuse_unsupported("sandbox provider none", ("network", "max_processes", "memory_mb"))
        self._count += 1
        number = self._count
        directory = tempfile.mkdtemp(prefix=f"rollout-sandbox-{os.getpid()}-")
        path = os.environ.get("PATH", os.defpath)
        base = {"PATH": path, "HOME": directory, "LANG": "C.UTF-8", "TMPDIR": directory}
        limits = limits_of(max_processes=spec.max_processes, memory_mb=spec.memory_mb)
        settings = {"env": base, "limits": limits, "remove": directory}
        try:
            if self._compiled is None:
                self._compiled = await compile_host(sys.executable)
            process = await run_host((), sys.executable, settings, compiled=self._compiled)
        except BaseException:
            os.rmdir(directory)
            raise
        sandbox = _NoSandbox(
            f"none-{os.getpid()}-{number}",
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
