"""The first process inside a sandbox: it runs what it is sent, each time in another process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from .call_output import CallOutput, OutputTail
from .interpreter import serve
from .program_files import collect_files, put_files, stamps_of
from .settings import (
    Settings,
    describe_error,
    encode,
    environment,
    read_frame,
    remove_contents,
    write_all,
)
from .system import die_with_parent, set_dumpable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_SHELLS = ("/bin/bash", "/bin/sh")
_PIECE = 65536
_STATUS = {b"\1": "ok", b"\0": "error"}
_BROKEN = b"\2"
#: Descriptors of a process.
_MAX_FILES = 256
#: Seconds that the processes of an earlier call, killed a moment ago, have to be gone.
_GONE_S = 1.0


def limit_resources(settings: Settings, *, counts_processes: bool) -> None:
    """Bounds that the kernel keeps, for this process and all that it starts."""
    bounds = {
        resource.RLIMIT_AS: settings.memory,
        resource.RLIMIT_FSIZE: settings.file_size,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MAX_FILES,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if not settings.bounds_address_space:
        del bounds[resource.RLIMIT_AS]
    if counts_processes:
        bounds[resource.RLIMIT_NPROC] = settings.processes + 1  # this one
    for kind, bound in bounds.items():
        _, highest = resource.getrlimit(kind)
        within = bound if highest == resource.RLIM_INFINITY else min(bound, highest)
        resource.setrlimit(kind, (within, within))


class ProgramHost:
    """Serves the calls of one sandbox, one after another.

    Args:
        settings: The bounds of a call.
        channel: Carries frames from and to the supervisor; its end ends this process.
        directory: Where programs run, and all that they can write to.
    """

    def __init__(self, settings: Settings, channel: int, directory: str) -> None:
        self._settings = settings
        self._channel = channel
        self._directory = directory
        self._interpreter: _Interpreter | None = None
        self._ended: dict[int, int] = {}
        # Written to by Python whenever a child ends: a reason for poll to return.
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> None:
        """Answer calls until the channel closes."""
        while True:
            frame = read_frame(self._channel)
            if frame is None:
                return
            request = json.loads(frame)
            try:
                answer = self._answer(request)
            except BlockingIOError:  # what earlier calls have left takes up all places
                most = self._settings.processes
                reason = f"no process could be started: at most {most} at once"
                answer = {"status": "stopped", "reason": reason, "output": ""}
            except OSError as error:
                answer = {"status": "stopped", "reason": describe_error(error), "output": ""}
            write_all(self._channel, encode(answer))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["language"] == "program":
            return self._run_program(request)
        before = stamps_of(self._directory) if request["collect"] else {}
        if request["language"] == "shell":
            return self._with_files(self._run_shell(request["code"]), request, before)
        if not request["is_fresh"]:
            if self._interpreter is None:
                self._interpreter = _Interpreter(self._directory, self._fork)
            answer = self._run_python(self._interpreter, request["code"])
            return self._with_files(answer, request, before)
        interpreter = _Interpreter(self._directory, self._fork)
        try:
            answer = self._run_python(interpreter, request["code"])
            return self._with_files(answer, request, before)
        finally:
            interpreter.close()
            _empty(self._directory)

    def _with_files(
        self, answer: dict[str, Any], request: dict[str, Any], before: dict[str, tuple[int, ...]]
    ) -> dict[str, Any]:
        """An answer with the files asked for that its call has written."""
        if not request["collect"]:
            return answer
        files, left_out = collect_files(
            self._directory, request["collect"], request["collected_bytes"], before
        )
        return {**answer, "files": files, "left_out": left_out}

    def _run_python(self, interpreter: _Interpreter, code: str) -> dict[str, Any]:
        interpreter.send(code)
        output = CallOutput(interpreter.output, self._settings.output)
        self._ended.clear()
        stopped = self._watch(output, interpreter.pid, interpreter.status)
        if stopped:
            return {"status": "stopped", "reason": stopped, "output": output.text()}
        said = os.read(interpreter.status, _PIECE)
        output.drain()
        if not said:
            reason = self._watch(output, interpreter.pid) or _ending(self._ended[interpreter.pid])
            return {"status": "stopped", "reason": reason, "output": output.text()}
        if said == _BROKEN:
            reason = "the code took modules from sys.modules that Python itself needs"
            return {"status": "stopped", "reason": reason, "output": output.text()}
        if said not in _STATUS:  # which call a later byte belongs to would be a guess
            reason = "the code wrote to a descriptor that it had not opened"
            return {"status": "stopped", "reason": reason, "output": output.text()}
        return {"status": _STATUS[said], "reason": "", "output": output.text()}

    def _run_shell(self, command: str) -> dict[str, Any]:
        readable, writable = os.pipe()
        self._ended.clear()
        try:
            pid = self._fork()
        except BlockingIOError:
            os.close(readable)
            os.close(writable)
            raise
        if pid == 0:
            _become_shell(command, writable, self._directory)
        os.close(writable)
        output = CallOutput(readable, self._settings.output)
        try:
            stopped = self._watch(output, pid)
            if not stopped:
                output.drain()
        finally:
            os.close(readable)
            _kill_group(pid)  # and not all: an interpreter may wait for its next call
        if stopped:
            return {"status": "stopped", "reason": stopped, "output": output.text()}
        code = os.waitstatus_to_exitcode(self._ended[pid])
        reason = "" if code == 0 else _ending(self._ended[pid])
        return {"status": "error" if code else "ok", "reason": reason, "output": output.text()}

    def _run_program(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a command with files of its own, and give back those that are asked for."""
        put_files(self._directory, request["files"])
        readable, writable = os.pipe()
        self._ended.clear()
        pid = self._fork()
        if pid == 0:
            _become_program(request["command"], request["environment"], writable, self._directory)
        os.close(writable)
        output = OutputTail(readable, self._settings.output)
        stopped = self._watch(output, pid)
        _kill_group(pid, is_alone=True)
        output.drain()
        os.close(readable)
        files, left_out = collect_files(
            self._directory, request["collect"], request["collected_bytes"]
        )
        answer = {"output": output.text(), "files": files, "left_out": left_out}
        if stopped:
            return {"status": "stopped", "reason": stopped, **answer}
        code = os.waitstatus_to_exitcode(self._ended[pid])
        reason = "" if code == 0 else _ending(self._ended[pid])
        return {"status": "error" if code else "ok", "reason": reason, "code": code, **answer}

    def _watch(self, output: CallOutput, pid: int, status: int | None = None) -> str:
        """Collect output until `status` has something to say; without it, until `pid` has ended.

        Returns:
            The bound that was met first; empty where none was.
        """
        poll = select.poll()
        for descriptor in (output.descriptor, self._wake, self._channel):
            poll.register(descriptor, select.POLLIN)
        if status is not None:
            poll.register(status, select.POLLIN)
        deadline = time.monotonic() + self._settings.timeout_s
        while True:
            left = deadline - time.monotonic()
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, left) * 1000)}
            if left <= 0:
                return "timeout"
            if self._channel in ready:  # nothing is due but the end
                os._exit(0)
            if self._wake in ready:
                self._reap()
            if output.descriptor in ready and not output.read():
                poll.unregister(output.descriptor)
            if output.is_full:
                return "output"
            if status in ready or (status is None and pid in self._ended):
                return ""

    def _fork(self) -> int:
        """`os.fork`, once there is room.

        Raises:
            BlockingIOError: What earlier calls have left takes up all places.
        """
        give_up = time.monotonic() + _GONE_S
        while True:
            try:
                return os.fork()
            except InterruptedError:  # a child ended while the supervisor was being asked
                continue
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise
                self._reap()
                time.sleep(0.01)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, _PIECE)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended[pid] = status


class _Interpreter:
    """A process that keeps its variables from one call to the next.

    Attributes:
        pid: The process.
        output: What it prints.
        status: One byte after each call.
    """

    def __init__(self, directory: str, fork: Callable[[], int]) -> None:
        requests, self._requests = os.pipe()
        self.output, output = os.pipe()
        self.status, status = os.pipe()
        try:
            self.pid = fork()
        except BlockingIOError:
            for descriptor in (requests, output, status):
                os.close(descriptor)
            self._close_pipes()
            raise
        if self.pid == 0:
            _leave_host(output, directory, kept=(requests, status))
            set_dumpable(True)
            serve(requests, status)
        for descriptor in (requests, output, status):
            os.close(descriptor)

    def send(self, code: str) -> None:
        write_all(self._requests, encode({"code": code}))

    def close(self) -> None:
        """End it, with what it has started, and close what leads to it."""
        _kill_group(self.pid, is_alone=True)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for descriptor in (self._requests, self.output, self.status):
            os.close(descriptor)


def _kill_group(leader: int, *, is_alone: bool = False) -> None:
    """Kill a call's processes; where it is alone in here, also those that left its group.

    Without a process namespace the supervisor, which sees them all, does the rest.
    """
    target = -1 if is_alone and os.getpid() == 1 else -leader
    try:
        os.kill(target, signal.SIGKILL)
    except ProcessLookupError:  # none is left
        return
    try:
        os.waitpid(leader, 0)
    except ChildProcessError:  # known already
        return


def _leave_host(output: int, directory: str, kept: Iterable[int] = ()) -> None:
    """What a new process does before it runs anything: a group, a directory, its output.

    Nothing that the host has open stays open, but for `kept`.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL)
    os.setsid()
    os.chdir(directory)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in set(range(3, _MAX_FILES)).difference(kept):
        try:
            os.close(descriptor)
        except OSError:
            continue


def _become_shell(command: str, output: int, directory: str) -> None:
    try:
        _leave_host(output, directory)
        # Python ignores these two; a program expects to end by them.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        shell = next(path for path in _SHELLS if os.path.exists(path))
        os.execve(shell, [shell, "-c", command], environment(directory))
    finally:
        os._exit(127)


def _become_program(command: list[str], own: dict[str, str], output: int, directory: str) -> None:
    try:
        _leave_host(output, directory)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, {**environment(directory), **own})
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    except ValueError as error:
        os.write(2, f"{error}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}"


def _empty(directory: str) -> None:
    """Remove all files, so that the next call finds none."""
    remove_contents(directory)
    if os.listdir(directory):
        raise OSError(errno.ENOTEMPTY, "files of an earlier call cannot be removed")


def start_host(settings: Settings, channel: int, directory: str) -> None:
    """Serve as the host of a sandbox whose bounds are in force; does not return."""
    os.environ.clear()
    os.environ.update(environment(directory))
    sys.argv = [""]
    ProgramHost(settings, channel, directory).run()
    os._exit(0)
