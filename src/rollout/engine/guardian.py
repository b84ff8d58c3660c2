"""Ends an engine whose driver has died, whatever holds on to the pipe between them.

A pipe closes when the last process that has it open ends, and a driver's forks have it open too: so
an engine also watches the driver itself. It leaves by itself then, unless it is stopped or stuck in
a library that holds the interpreter's lock; a guardian, a process of its own, ends it from outside,
together with what it has started. This file is its program.

Loaded in engine processes: imports the standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

#: Between two looks.
LOOK_S = 0.25
#: From the driver's death to the end by force. The promise is 5 s, also on a machine that is busy.
GRACE_S = 2.0
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
    itself. The guardian is no child of this process: nobody finds it among its driver's.
    """
    program = [sys.executable, "-I", "-S", __file__]
    command = [*program, driver, name_of(os.getpid()), str(os.getpgrp())]
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    try:
        if not os.fork():
            _let_go()
            os.execv(command[0], command)
    finally:
        os._exit(1)


def _let_go() -> None:
    """Keep nothing of the engine open, and nothing but the end from ending the guardian."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def main(driver: str, engine: str, group: str) -> None:
    """Watch, and end the engine when it is time."""
    _watch(driver, engine)
    _end(engine, int(group))


def _watch(driver: str, engine: str) -> None:
    pause, patience = threading.Event(), GRACE_S
    while is_alive(engine) and patience > 0:
        pause.wait(LOOK_S)
        if not is_alive(driver):
            patience -= LOOK_S


def _end(engine: str, group: int) -> None:
    """Kill the engine and its group, this process among them."""
    pid = int(engine.split()[0])
    with suppress(ProcessLookupError):
        if group == pid:
            os.killpg(group, signal.SIGKILL)
        elif is_alive(engine):  # it was not given a group of its own
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
