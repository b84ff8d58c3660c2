"""Which isolation this machine can give, found by trying."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from rollout.errors import ToolError
from rollout.tools.sandbox.process import Method, SandboxProcess, SandboxSpec
from rollout.tools.sandbox.sandbox_limits import SandboxLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

Isolation = Literal["auto", "namespaces", "bubblewrap", "landlock", "none"]

#: In the order of preference.
METHODS: tuple[Method, ...] = ("namespaces", "bubblewrap", "landlock")

WHAT_IT_IS = {
    "namespaces": "user, mount, pid and network namespaces, seccomp",
    "bubblewrap": "bubblewrap, seccomp",
    "landlock": "Landlock, seccomp",
    "none": "no isolation: programs can do what the driver can",
}

WHAT_IT_NEEDS: dict[str, str] = {
    "namespaces": "user namespaces, or root that may mount",
    "bubblewrap": "the package bubblewrap, and user namespaces",
    "landlock": "Landlock and seccomp, of Linux 6.12 or newer",
}

_PROBE_LIMITS = SandboxLimits(memory_mb=256, max_processes=4, timeout_s=20, cpu_s=20)
_NOT_HELD = "does not hold: "
#: Says what does not hold; run in a real sandbox, because kernels, containers and their policies
#: refuse and grant in too many ways to know beforehand. It ends with its sandbox.
_PROBE = f"""
import os, signal, socket, sys, tempfile

faults, children = [], []
for _ in range({_PROBE_LIMITS.max_processes} + 4):
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        signal.pause()
        os._exit(0)
    children.append(child)
else:
    faults.append("the limit on processes")
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
try:
    bytearray(1024 * 2**20)
    faults.append("the limit on memory")
except MemoryError:
    pass
home = os.path.realpath(os.getcwd())
for place in ("/", "/usr", "/tmp", "/var/tmp", "/dev/shm", os.path.dirname(home)):
    if os.path.realpath(place) == home:
        continue
    try:
        path = os.path.join(place, "rollout-probe-%d" % os.getpid())
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.unlink(path)
        faults.append("files outside " + home)
    except OSError:
        pass
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
    faults.append("the network")
except OSError:
    pass
if faults:
    sys.exit("{_NOT_HELD}" + ", ".join(dict.fromkeys(faults)))
"""

#: What is missing by method and interpreter; None where nothing is.
_known: dict[tuple[Method, str], str | None] = {}


class IsolationReport(msgspec.Struct, frozen=True):
    """What was found: the method that holds, if any, and what each one before it lacks."""

    method: Method | None
    missing: dict[str, str]

    def describe(self) -> str:
        """One line for people."""
        if self.method is not None:
            return f"{self.method} ({WHAT_IT_IS[self.method]})"
        return "none holds here: " + self._lacks()

    def _lacks(self) -> str:
        return "; ".join(
            f"{method}: {fault}"
            # Where it could be made and does not hold, what it needs is there.
            + ("" if fault.startswith(_NOT_HELD) else f" (needs {WHAT_IT_NEEDS[method]})")
            for method, fault in self.missing.items()
        )

    def error(self) -> ToolError:
        """Why nothing can be run, and what to do about it."""
        return ToolError(
            f"no isolation for programs that models write: {self._lacks()}; mend one of these, or "
            f'accept isolation="none", where programs can do what the driver can'
        )


async def find_isolation(
    wanted: Isolation, spec: SandboxSpec, *, is_fresh: bool = False
) -> IsolationReport:
    """The first method that really holds here, of all or of the one that is wanted.

    The first look takes some tenths of a second for each method; what it finds is remembered.

    Args:
        wanted: "auto" for the best one.
        spec: Whose interpreter and programs are meant.
        is_fresh: Looks again.
    """
    if wanted == "none":
        return IsolationReport("none", {})
    missing: dict[str, str] = {}
    for method in METHODS if wanted == "auto" else (wanted,):
        key = (method, spec.python)
        if is_fresh or key not in _known:
            _known[key] = await _fault(msgspec.structs.replace(spec, method=method))
        fault = _known[key]
        if fault is None:
            return IsolationReport(method, missing)
        missing[method] = fault
    return IsolationReport(None, missing)


async def _fault(spec: SandboxSpec) -> str | None:
    """What keeps this method from holding here; None where nothing does."""
    if spec.method == "bubblewrap" and not spec.bubblewrap:
        return "there is no program bwrap"
    try:
        probed = SandboxSpec(
            method=spec.method,
            limits=_PROBE_LIMITS,
            python=spec.python,
            bubblewrap=spec.bubblewrap,
        )
        sandbox = await SandboxProcess.start(probed)
    except ToolError as error:
        return " ".join(str(error).split())
    try:
        answer = await sandbox.call("python", _PROBE, is_fresh=True)
    finally:
        await sandbox.close()
    if answer.status == "ok":
        return None
    return " ".join((answer.output or _PROBE_LIMITS.describe(answer.reason)).split())


def check_isolation_name(value: object) -> Isolation:
    """`value`, if it is one.

    Raises:
        ToolError: It is none; the known ones are listed.
    """
    if value not in get_args(Isolation):
        known = ", ".join(repr(name) for name in get_args(Isolation))
        raise ToolError(f"isolation = {value!r}: expected one of {known}")
    return value  # type: ignore[return-value]


def bubblewrap_program(search: Sequence[str] = ()) -> str:
    """Where ``bwrap`` is; empty where it is not installed."""
    return shutil.which("bwrap", path=":".join(search) or None) or ""
