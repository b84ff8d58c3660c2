"""Ends an engine whose driver has died, whatever holds on to the pipe between them.

A pipe closes when the last process that has it open ends, and a driver's forks have it open too: so
an engine also watches the driver itself. It leaves by itself then, unless it is stopped or stuck in
a library that holds the interpreter's lock; a guardian, a process of its own, ends it from outside,
together with what it has started, and removes what it leaves in shared memory. This file is its
program.

Loaded in engine processes: imports the standard library only.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import stat
import sys
import threading
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Between two looks.
LOOK_S = 0.25
#: From the driver's death to the end by force. The promise is 5 s, also on a machine that is busy.
GRACE_S = 2.0
#: Of the environment: a search for an engine by its variables should find the engine only.
NEEDED = ("LD_LIBRARY_PATH",)
#: What tells a guardian that it is not needed any longer, and for how long it is waited for.
RELEASED, RELEASE_S = b"\0", 1.0
#: Where files are in memory.
SHARED = "/dev/shm"
#: In ``/proc/<pid>/stat``, counted after the name: the state, the threads, and the start.
STATE, THREADS, START = 0, 17, 19


def name_of(pid: int) -> str:
    """A process by number, start and namespace: numbers are used again.

    Where the system does not tell (no ``/proc``), by its number alone.
    """
    facts = _facts(pid)
    return f"{pid} {facts[START] if facts else '-'} {_namespace()}"


def is_alive(name: str) -> bool:
    """Whether a process that `name_of` named still runs.

    One of another namespace cannot be seen, and is taken to be alive.
    """
    number, start, namespace = name.split()
    if namespace != _namespace():
        return True
    pid = int(number)
    if start == "-":
        return _answers(pid)
    facts = _facts(pid)
    if facts is None or facts[START] != start:
        return False
    # A zombie has ended; one with threads has only lost its first one.
    return facts[STATE] not in "ZX" or int(facts[THREADS]) > 1


def _facts(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "-"


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is somebody else's
    return True


def guard(driver: str) -> None:
    """Have a process of its own end this one's group when this one or its driver has ended.

    To be called before there are threads. A driver that has died gives it `GRACE_S` to end by
    itself. The guardian is no child of this process, and not found among its driver's.
    """
    program = [sys.executable, "-I", "-S", __file__]
    command = [*program, driver, name_of(os.getpid()), str(os.getpgrp())]
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(reading)
        os.waitpid(between, 0)
        _ledger.append((writing, shared_files()))
        return
    try:
        if not os.fork():
            _let_go(reading)
            os.execve(command[0], command, {n: os.environ[n] for n in NEEDED if n in os.environ})
    finally:
        os._exit(1)


#: Where the guardian listens, in a process that has one, and what was in shared memory before.
_ledger: list[tuple[int, set[str]]] = []


def release_guardian() -> None:
    """Have the guardian leave, and return when it has: this process ends in order."""
    for descriptor, _ in _ledger:
        with suppress(OSError):
            os.write(descriptor, RELEASED)
            left = select.poll()
            left.register(descriptor, 0)  # its end of the pipe closes, which is an error here
            left.poll(1000 * RELEASE_S)


def remove_at_end(path: str) -> None:
    """Have a file or a directory removed when this process has ended, however it ends."""
    for descriptor, _ in _ledger:
        with suppress(OSError):
            os.write(descriptor, os.fsencode(path) + b"\n")


def remove_shared_files_at_end() -> None:
    """The same for what this process and its children have in shared memory by now."""
    for _, before in _ledger:
        for path in mapped_files(_session_of(os.getsid(0))) - before:
            remove_at_end(path)


def shared_files() -> set[str]:
    """What lies in shared memory."""
    try:
        return {f"{SHARED}/{name}" for name in os.listdir(SHARED)}
    except OSError:
        return set()


def mapped_files(pids: Iterable[int]) -> set[str]:
    """What of it these processes use: files, and not those in directories.

    By inode: a semaphore has had another name when it was mapped.
    """
    used: set[int] = set()
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            lines = (line.split(maxsplit=5) for line in maps if b" " + SHARED.encode() in line)
            used |= {int(inode) for _, _, _, _, inode, _ in lines}
    return {path for path in shared_files() if _inode(path) in used}


def _inode(path: str) -> int:
    try:
        status = os.lstat(path)
    except OSError:
        return -1
    return status.st_ino if stat.S_ISREG(status.st_mode) else -1


def remove(paths: Iterable[str]) -> None:
    """Remove files and directories; what is gone already does no harm."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)
        shutil.rmtree(path, ignore_errors=True)


# The guardian.


def _let_go(ledger: int) -> None:
    """Keep nothing of the engine but the ledger, and nothing but the end from ending the guardian.

    It leaves the engine's group, and stays in its session: the number of neither is used again.
    """
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, source in ((0, ledger), (1, nothing), (2, nothing)):
        os.dup2(source, descriptor)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def main(driver: str, engine: str, group: str) -> None:
    """Watch, end the engine when it is time, and remove what it leaves."""
    before = shared_files()
    ledger, *released = _watch(driver, engine).split(RELEASED)
    left = set() if released else mapped_files(_session_of(int(group))) - before
    if not released:
        _end(engine, int(group))
    remove(left | {os.fsdecode(line) for line in ledger.split(b"\n") if line})


def _watch(driver: str, engine: str) -> bytes:
    """Return when it is time, with what the engine has written down."""
    written, is_open, patience = b"", True, GRACE_S
    while is_alive(engine) and patience > 0 and RELEASED not in written:
        if is_open and select.select([0], [], [], LOOK_S)[0]:
            words = os.read(0, 65536)
            written, is_open = written + words, bool(words)
            continue
        if not is_open:  # it has ended, or is about to
            threading.Event().wait(LOOK_S / 10)
        if not is_alive(driver):
            patience -= LOOK_S if is_open else LOOK_S / 10
    return written


def _session_of(leader: int) -> Iterator[int]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.getsid(int(name)) == leader:
                yield int(name)


def _end(engine: str, group: int) -> None:
    """Kill the engine and its group."""
    pid = int(engine.split()[0])
    with suppress(ProcessLookupError):
        if group == pid:
            os.killpg(group, signal.SIGKILL)
        elif is_alive(engine):  # it was not given a group of its own
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
