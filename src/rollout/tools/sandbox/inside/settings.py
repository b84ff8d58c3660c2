"""What the driver tells a sandbox at its start, and the frames that the processes exchange."""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
import traceback
from contextlib import suppress
from typing import Any, NamedTuple

_LENGTH = struct.Struct("=I")
#: Longest frame: the code of a call, or its output with what JSON adds.
MAX_FRAME = 64 * 2**20

#: Programs, their libraries and the little of /etc that they read.
SYSTEM_PATHS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store"),
    *("/etc/alternatives", "/etc/ca-certificates", "/etc/ld.so.cache", "/etc/ld.so.conf"),
    *("/etc/ld.so.conf.d", "/etc/localtime", "/etc/mime.types", "/etc/nsswitch.conf"),
    *("/etc/os-release", "/etc/ssl/certs", "/etc/ssl/openssl.cnf"),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
#: The writable directory where there is a root of the sandbox's own.
WORK_DIRECTORY = "/sandbox"


class Settings(NamedTuple):
    """One sandbox.

    Attributes:
        method: "namespaces", "bubblewrap", "landlock" or "none".
        readable: Paths that programs inside may read, beside the system and the interpreter.
        directory: Where a directory for files is made, where the method uses a real one.
        bubblewrap: The program ``bwrap``.
        timeout_s: Seconds of one call.
        cpu_s: CPU seconds of one call, of all its processes together.
        memory: Bytes of address space of a process, and of memory of all together.
        disk: Bytes of all files.
        file_size: Bytes of one file.
        processes: Processes and threads at once.
        output: Bytes that a call may print.
        door: Host and port that programs inside reach at 127.0.0.1 and that port; empty for none.
        bounds_address_space: Whether `memory` bounds the address space of a process too.
    """

    method: str
    readable: list[str]
    directory: str
    bubblewrap: str
    timeout_s: float
    cpu_s: float
    memory: int
    disk: int
    file_size: int
    processes: int
    output: int
    door: list[Any]
    bounds_address_space: bool


def readable_paths(settings: Settings) -> list[str]:
    """Existing paths for programs inside to read; none lies within another."""
    own = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__)}
    own |= {sys.executable, os.path.realpath(sys.executable)}
    paths: list[str] = []
    for path in sorted({*SYSTEM_PATHS, *own, *settings.readable}):
        is_covered = any(path == parent or path.startswith(parent + "/") for parent in paths)
        if not is_covered and os.path.exists(path):
            paths.append(path)
    return paths


def private_path(paths: list[str]) -> str | None:
    """The first of these that only its owner can reach; None where all users can reach them."""
    for path in paths:
        place = os.path.realpath(path)
        while place != "/":
            if os.path.isdir(place) and not os.stat(place).st_mode & stat.S_IXOTH:
                return path
            place = os.path.dirname(place)
    return None


def environment(directory: str) -> dict[str, str]:
    """The whole environment of programs inside: nothing of the driver's is handed on."""
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": directory,
        "TMPDIR": directory,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        # Each thread of a numeric library takes its share of the limits at import.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def describe_error(error: BaseException) -> str:
    """What went wrong, for people; where it is no failure of the system, with its place."""
    if not isinstance(error, OSError):
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = error.strerror or str(error)
    return text if error.filename is None else f"{error.filename}: {text}"


def encode(message: dict[str, Any]) -> bytes:
    """A frame: its length in four bytes, then JSON."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def read_frame(descriptor: int) -> bytes | None:
    """The body of the next frame; None where the other side has ended, even halfway."""
    header = _read_exactly(descriptor, _LENGTH.size)
    if header is None:
        return None
    (length,) = _LENGTH.unpack(header)
    return _read_exactly(descriptor, length) if length <= MAX_FRAME else None


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`; a reader that has gone is no error here, for its end is seen anyway."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except (BrokenPipeError, ConnectionResetError):
        return


def _read_exactly(descriptor: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            piece = os.read(descriptor, min(size - len(data), 2**20))
        except ConnectionResetError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)


def remove_contents(directory: str) -> None:
    """Remove all that is in a directory; what cannot be removed is left.

    Without recursion, for directories may be nested deeper than Python's stack.
    """
    waiting = [directory]
    while waiting:
        place = waiting[-1]
        below = _unlink_files(place)
        if below:
            waiting += below
            continue
        waiting.pop()
        if place != directory:
            try:
                os.rmdir(place)
            except OSError:  # or the loop above would find it again
                return


def _unlink_files(directory: str) -> list[str]:
    """Remove the files of a directory; returns its directories."""
    below = []
    with suppress(OSError):  # not to be changed here: maybe it is open anyway
        os.chmod(directory, 0o700)
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                below.append(entry.path)
            else:
                os.unlink(entry.path)
    return below
