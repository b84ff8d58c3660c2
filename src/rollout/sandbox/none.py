"""No sandbox: commands run as the driver's user, in a directory of their own.

For trusted code, and where the machine or container is itself the wall. Commands can read and write
what the driver can, and can reach its network. Closing removes the directory and every process that
did not leave by itself, a driver's death too.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING

from rollout.sandbox.local import LocalProvider, LocalSandbox, limit_commands

if TYPE_CHECKING:
    from rollout.config.sandbox_section import SandboxSpec


class _NoSandbox(LocalSandbox):
    async def expose_port(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    async def _host_url(self, url: str) -> str:
        return url


class NoneProvider(LocalProvider):
    """Makes directories.

    Args:
        cleanup_s: Seconds that closing a sandbox may take.
    """

    name = "none"

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        """See `SandboxProvider.open`."""
        spec.refuse_unsupported("sandbox provider none", ("network", "max_processes", "memory_mb"))
        directory = tempfile.mkdtemp(prefix=f"rollout-sandbox-{os.getpid()}-")
        path = os.environ.get("PATH", os.defpath)
        settings = {
            "env": {"PATH": path, "HOME": directory, "LANG": "C.UTF-8", "TMPDIR": directory},
            "limits": limit_commands(spec.max_processes, spec.memory_mb),
            "remove": directory,
        }
        try:
            return await self._start(
                _NoSandbox, spec, [sys.executable], settings, workdir=directory
            )
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
