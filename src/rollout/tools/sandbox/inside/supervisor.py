"""The process that stands between the driver and a sandbox: starts it, watches it, ends it."""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from . import starting
from .door import open_door
from .process_tree import (
    ProcessFacts,
    descendants,
    disk_use,
    end_descendants,
    signal_descendants,
    thaw_descendants,
)
from .seccomp import answer_fork
from .settings import Settings, describe_error, encode, read_frame, remove_contents, write_all
from .system import adopt_orphans

_IN, _OUT = 0, 1
#: Looks at memory, CPU time and files while a call runs: soon at first, then ever more rarely.
_FIRST_LOOK_S = 0.05
_LONGEST_PAUSE_S = 0.5
#: The host ends a call at its time; this is for a host that a program inside has stopped.
_GRACE_S = 2.0


class SandboxSupervisor:
    """Passes frames between the driver (standard streams) and the host, and keeps the bounds.

    Returns from `run` at the end of standard input, which the driver's death is too, or when the
    sandbox has been stopped for good.
    """

    def __init__(self, settings: Settings, sandbox: starting.Sandbox) -> None:
        self._settings = settings
        self._sandbox = sandbox
        self._channel = sandbox.channel.fileno()
        self._listener = -1
        self._own: frozenset[int] = frozenset()
        self._call: _Call | None = None
        self._poll = select.poll()
        for descriptor in (_IN, self._channel):
            self._poll.register(descriptor, select.POLLIN)

    def run(self) -> None:
        """Serve until either side ends."""
        while True:
            timeout_s = None if self._call is None else self._call.until_next_look_s()
            ready = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
            descriptors = {descriptor for descriptor, _ in ready}
            if self._listener in descriptors:
                self._answer_fork()
            if self._channel in descriptors and not self._pass_answer():
                return
            if _IN in descriptors and not self._pass_request():
                return
            if self._call is not None and self._call.is_look_due():
                fault = self._fault(self._call)
                if fault:
                    _answer_driver({"status": "stopped", "reason": fault, "output": ""})
                    return

    def receive_start(self) -> bool:
        """Take the host's first frame and the descriptor with it: its door, or for its forks."""
        descriptors = array.array("i", [0])
        data, ancillary, *_ = self._sandbox.channel.recvmsg(
            4096, socket.CMSG_SPACE(descriptors.itemsize)
        )
        for _, _, payload in ancillary:
            descriptors.frombytes(payload)
            if self._settings.door:
                host, port = self._settings.door
                open_door(socket.socket(fileno=descriptors[-1]), (host, port))
            else:
                self._listener = descriptors[-1]
                self._poll.register(self._listener, select.POLLIN)
        if not data:
            reason = self._sandbox.last_output() or "it ended while starting"
            _answer_driver({"status": "stopped", "reason": reason})
            return False
        # Nothing has been run yet: these are ours, and are left alone from here on.
        self._own = frozenset(process.pid for process in descendants(os.getpid()))
        if self._sandbox.pid not in self._own:
            reason = "/proc does not list the children of processes (CONFIG_PROC_CHILDREN)"
            _answer_driver({"status": "stopped", "reason": reason})
            return False
        write_all(_OUT, data)
        return b'"ready"' in data

    def _pass_request(self) -> bool:
        frame = read_frame(_IN)
        if frame is None:
            return False
        request = json.loads(frame)
        thaw_descendants(os.getpid(), self._own)
        self._call = _Call(descendants(os.getpid()), not request.get("is_fresh", True))
        write_all(self._channel, encode(request))
        return True

    def _pass_answer(self) -> bool:
        frame = read_frame(self._channel)
        if frame is None:
            reason = "the sandbox ended"
            _answer_driver({"status": "stopped", "reason": reason, "output": ""})
            return False
        call, self._call = self._call, None
        # Nothing runs on between calls.
        keeps = call is not None and call.keeps_processes
        number = signal.SIGSTOP if keeps else signal.SIGKILL
        signal_descendants(os.getpid(), number, self._own)
        _answer_driver(json.loads(frame))
        return True

    def _answer_fork(self) -> None:
        running = sum(process.threads for process in descendants(os.getpid()))
        answer_fork(self._listener, is_allowed=running <= self._settings.processes)

    def _fault(self, call: _Call) -> str:
        """The bound that the call has passed; empty where it has passed none."""
        settings, processes = self._settings, descendants(os.getpid())
        if time.monotonic() - call.started > settings.timeout_s + _GRACE_S:
            return "timeout"
        if sum(process.memory for process in processes) > settings.memory:
            return "memory"
        if sum(process.cpu_s for process in processes) - call.cpu_s_before > settings.cpu_s:
            return "cpu"
        directory = self._sandbox.directory
        if directory is not None and disk_use(directory) > settings.disk:
            return "disk"
        return ""


class _Call:
    """A call under way, and when to look at it next."""

    def __init__(self, before: list[ProcessFacts], keeps_processes: bool) -> None:
        self.started = time.monotonic()
        self.keeps_processes = keeps_processes
        self.cpu_s_before = sum(process.cpu_s for process in before)
        self._pause_s = _FIRST_LOOK_S
        self._next_look = self.started + self._pause_s

    def until_next_look_s(self) -> float:
        return max(0.0, self._next_look - time.monotonic())

    def is_look_due(self) -> bool:
        """Whether it is time; then the next look is planned."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._next_look = now + self._pause_s
        return True


def _answer_driver(message: dict[str, Any]) -> None:
    write_all(_OUT, encode(message))


def _new_directory(parent: str) -> str:
    path = os.path.join(parent, f"rollout-sandbox-{os.getpid()}-{os.urandom(4).hex()}")
    os.mkdir(path, 0o700)
    return path


def _remove(directory: str) -> None:
    remove_contents(directory)
    try:
        os.rmdir(directory)
    except OSError:  # paths longer than the kernel takes: this program goes down step by step
        os.spawnlp(os.P_WAIT, "rm", "rm", "-rf", "--", directory)


def _supervise(settings: Settings, directory: str | None) -> None:
    sandbox = starting.start(settings, directory)
    try:
        supervisor = SandboxSupervisor(settings, sandbox)
        if supervisor.receive_start():
            supervisor.run()
    finally:
        # The first process of a process namespace takes all others with it, at once.
        os.kill(sandbox.pid, signal.SIGKILL)
        end_descendants()


def main() -> None:
    """Run one sandbox: the first frame of standard input holds its settings."""
    frame = read_frame(_IN)
    if frame is None:
        return
    settings = Settings(**json.loads(frame))
    adopt_orphans()
    directory = None
    try:
        if settings.method in starting.REAL_DIRECTORY:
            directory = _new_directory(settings.directory)
        _supervise(settings, directory)
    except BaseException as error:
        _answer_driver({"status": "stopped", "reason": describe_error(error)})
    finally:
        if directory is not None:
            _remove(directory)
    sys.exit(0)
