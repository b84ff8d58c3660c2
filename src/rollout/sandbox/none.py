"""No sandbox: commands run as the driver's user, in a directory of their own.

For trusted code, and where the machine or container is itself the wall. Commands can read and write
what the driver can, and can reach its network. Closing removes the directory and every process that
did not leave by itself, a driver's death too.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING

from rollout.sandbox.local import LocalSandbox, limits_of

if TYPE_CHECKING:
    from rollout.sandbox.spec import SandboxSpec


class _NoSandbox(LocalSandbox):
    async def expose_port(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    async def _host_url(self, url: str) -> str:
        return url


class NoneProvider:
    """Makes directories.

    Args:
        cleanup_s: Seconds that closing a sandbox may take.
    """

    name = "none"
    max_open = 256

    def __init__(self, *, cleanup_s: float = 10.0) -> None:
        self._cleanup_s = cleanup_s
        self._numbers = itertools.count(1)

    async def check(self) -> None:
        """See `SandboxProvider.check`: there is nothing to lack."""

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        """See `SandboxProvider.open`."""
        spec.refuse_unsupported("sandbox provider none", ("network", "max_processes", "memory_mb"))
        directory = tempfile.mkdtemp(prefix=f"rollout-sandbox-{os.getpid()}-")
        path = os.environ.get("PATH", os.defpath)
        settings = {
            "env": {"PATH": path, "HOME": directory, "LANG": "C.UTF-8", "TMPDIR": directory},
            "limits": limits_of(max_processes=spec.max_processes, memory_mb=spec.memory_mb),
            "remove": directory,
        }
        try:
            return await _NoSandbox.start(
                f"none-{os.getpid()}-{next(self._numbers)}",
                spec,
                [sys.executable],
                settings,
                workdir=directory,
                cleanup_s=self._cleanup_s,
            )
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    async def sweep(self) -> int:
        """See `SandboxProvider.sweep`: a sandbox ends with its driver."""
        return 0

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
