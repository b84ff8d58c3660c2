"""Sandboxes on this machine: the driver's side of ``inside/host.py``, which tells the protocol.

One process a sandbox, which ends with the driver's end of its socket. Every request waits on a pipe
of its own, so no task reads in the background.
"""

from __future__ import annotations

import itertools
import marshal
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit, urlunsplit

import anyio

from rollout.errors import SandboxError, SandboxLost, SandboxUnsupported
from rollout.sandbox.api import MIB, Command, ExecResult, Sandbox, SandboxProvider, timed_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anyio.abc import Process

    from rollout.config.sandbox_section import SandboxSpec

#: Runs the program that comes first through standard input, so that ``ps`` inside shows a short
#: line. It is a text the first time, and then what that host has made of it.
_START = (
    "import marshal, os; program = marshal.loads(os.read(0, 1 << 18))\n"
    "if type(program) is str: program = compile(program, 'host', 'exec')\n"
    "exec(program)"
)
#: Seconds that a host has to answer once a command was killed.
_KILL_S = 5.0


@cache
def read_program(name: str) -> str:
    """The text of a program that runs inside."""
    return Path(__file__).with_name("inside").joinpath(f"{name}.py").read_text(encoding="utf-8")


class LocalProvider(SandboxProvider):
    """What providers on this machine share.

    Args:
        cleanup_s: Seconds that closing a sandbox may take.
    """

    max_open = 256

    def __init__(self, *, cleanup_s: float = 10.0) -> None:
        self._cleanup_s = cleanup_s
        self._numbers = itertools.count(1)
        self._compiled = b""  # the host's program, by the interpreter of this machine

    async def _start(
        self,
        make: Callable[..., LocalSandbox],
        spec: SandboxSpec,
        command: Sequence[str],
        settings: dict[str, Any],
        *,
        workdir: str,
        fds: Sequence[int] = (),
    ) -> LocalSandbox:
        """Start a host in a session of its own, and put in what the spec has.

        Args:
            command: Ends in the interpreter that runs the host.
            settings: What ``inside/host.py`` calls so.
            fds: Descriptors that the command reads.

        Raises:
            SandboxError: It does not run, with what it said instead; or the spec's setup failed.
        """
        control, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        program = self._compiled if spec.image is None else b""
        control.send(program or marshal.dumps(read_program("host"), 2))
        control.send(marshal.dumps(settings, 2))
        errors = make_file()
        try:
            with inner, anyio.CancelScope(shield=True):
                process = await anyio.open_process(
                    [*command, "-I", "-S", "-c", _START],
                    stdin=inner.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=errors.fileno(),
                    start_new_session=True,
                    pass_fds=tuple(fds),
                )
        except OSError as error:
            control.close()
            errors.close()
            raise SandboxError(f"cannot run {command[0]!r}: {error.strerror}") from error
        identity = f"{self.name}-{os.getpid()}-{next(self._numbers)}"
        sandbox = make(
            identity,
            process,
            control,
            errors,
            workdir=workdir,
            env=spec.env,
            cleanup_s=self._cleanup_s,
        )
        await sandbox.prepare(spec)
        if spec.image is None:
            self._compiled = sandbox.compiled
        return sandbox


class LocalSandbox(Sandbox):
    """A sandbox whose commands ``inside/host.py`` runs."""

    max_input_bytes = 2**32

    def __init__(
        self,
        identity: str,
        process: Process,
        control: socket.socket,
        errors: BinaryIO,
        *,
        relay: Relay | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(identity, **shared)
        self._process = process
        self._control = control
        self._errors = errors
        #: The host's program as code of its interpreter, once it runs.
        self.compiled = b""
        self._relay = relay
        self._sending = anyio.Lock()

    async def _begin(self, spec: SandboxSpec) -> None:
        """Wait until the host runs."""
        with self._errors as errors:
            await anyio.wait_readable(self._control)
            with suppress(ConnectionResetError):  # it ended before it had read all
                self.compiled = self._control.recv(1 << 18)
            if self.compiled:
                return
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()[-1000:]
            raise SandboxError(f"{self.id} does not start: {text}")

    async def _host_url(self, url: str) -> str:
        if self._relay is None:
            return await super()._host_url(url)
        return await self._relay.connect(self, url)

    async def _close(self) -> None:
        # The host ends with the socket, and with it all that it has started.
        anyio.notify_closing(self._control)
        self._control.close()
        with anyio.move_on_after(self.cleanup_s / 2):
            await self._process.wait()
            return
        kill_with_children(self._process.pid)
        await self._process.wait()

    async def _run(self, command: Command) -> ExecResult:
        if command.user is not None:
            raise SandboxUnsupported(f"{self.id} has one user; user = {command.user!r}")
        request = {
            "argv": command.argv,
            "cwd": command.cwd,
            "env": command.env,
            "cap": command.max_output_bytes,
            "keep": command.keep,
        }
        with ExitStack() as stack:
            exchange = stack.enter_context(make_file(marshal.dumps(request, 2)))
            done, far_done = map(stack.enter_context, socket.socketpair())
            done.setblocking(False)
            with _open_input(command.input) as source:
                await self._send(exchange, source, far_done)
            far_done.close()
            with anyio.move_on_after(command.timeout_s) as scope:
                try:
                    await anyio.wait_readable(done)
                except anyio.get_cancelled_exc_class():
                    done.shutdown(socket.SHUT_WR)  # which kills it
                    with anyio.move_on_after(_KILL_S, shield=True):
                        await anyio.wait_readable(done)
                    raise
            is_answered = b""
            with suppress(OSError):
                is_answered = done.recv(1)
            if not is_answered:
                raise SandboxLost(f"{self.id} has ended")
            exchange.seek(0)
            error, code, size, is_cut = map(int, exchange.readline().split())
            if error:
                raise OSError(error, os.strerror(error), command.cwd)
            result = ExecResult(
                exit_code=code,
                stdout=exchange.read(size),
                stderr=exchange.read(),
                truncated=bool(is_cut),
            )
        if scope.cancelled_caught:
            raise timed_out(command, result)
        return result

    async def _send(self, *files: BinaryIO | socket.socket) -> None:
        async with self._sending:
            while True:
                try:
                    socket.send_fds(self._control, [b"run"], [file.fileno() for file in files])
                    return
                except BlockingIOError:
                    with suppress(anyio.ClosedResourceError):
                        await anyio.wait_writable(self._control)
                except OSError as error:
                    raise SandboxLost(f"{self.id} has ended") from error


def make_file(data: bytes = b"") -> BinaryIO:
    """A file in memory, at its beginning."""
    file = open(os.memfd_create("rollout"), "w+b", buffering=0)  # noqa: SIM115  (the caller's)
    file.write(data)
    file.seek(0)
    return file


def _open_input(data: bytes) -> BinaryIO:
    """Not an empty file: some programs take that for input."""
    return make_file(data) if data else open(os.devnull, "rb")


def kill_with_children(pid: int) -> None:
    """Kill a process that does not end, and its children: bubblewrap's own child is process 1."""
    children = ""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    for each in [*map(int, children.split()), pid]:
        with suppress(OSError):
            os.kill(each, signal.SIGKILL)


class Relay:
    """Leads programs in sandboxes without a network to servers on this machine.

    A process outside listens on a Unix socket in a directory, which sandboxes see at `inside`, and
    connects to the server; one in each sandbox listens on a port of its own and connects to the
    socket. Those outside, and the directory, end with this driver.
    """

    def __init__(self, inside: str, python: str = "python3") -> None:
        self._inside = inside
        self._python = python
        self._directory: Path | None = None
        self._servers: set[str] = set()
        self._processes: list[Process] = []
        self._lock = anyio.Lock()

    async def open_directory(self, files: Mapping[str, str] | None = None) -> Path:
        """The directory, in which ``door`` is for sockets; made once, with `files` in it."""
        async with self._lock:
            if self._directory is None:
                prefix = f"rollout-door-{os.getpid()}-"
                directory = Path(tempfile.mkdtemp(prefix=prefix, dir=find_open_place()))
                remove = 'cat >/dev/null; exec rm -rf -- "$1"'
                await self._start("/bin/sh", "-c", remove, "sh", str(directory))
                _fill(directory, files or {})
                self._directory = directory
        return self._directory

    async def connect(self, sandbox: Sandbox, url: str) -> str:
        """The URL of a server of this machine as programs in the sandbox see it."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise SandboxUnsupported(f"{sandbox.id}: {url!r}: only http:// can be reached")
        server = f"{parts.hostname}:{parts.port or 80}"
        name = re.sub(r"[^\w.-]", "_", server) + ".sock"
        path = await self.open_directory() / "door" / name
        program = read_program("relay")
        async with self._lock:
            if server not in self._servers:
                command = [sys.executable, "-I", "-S", "-c", program, str(path), server]
                process = await self._start(*command)
                assert process.stdout is not None
                try:
                    await process.stdout.receive()  # it listens
                except anyio.EndOfStream:
                    raise SandboxError(f"no relay to {server}") from None
                self._servers.add(server)
        command = [self._python, "-I", "-S", "-", "127.0.0.1:0", f"{self._inside}/{name}"]
        result = await sandbox.exec(command, input=program, timeout_s=60)
        if result.exit_code or not result.stdout.strip().isdigit():
            said = result.stderr[-500:].decode(errors="replace")
            raise SandboxError(f"{sandbox.id}: no relay to {url}: {said}")
        return urlunsplit(parts._replace(netloc=f"127.0.0.1:{int(result.stdout)}"))

    async def _start(self, *command: str) -> Process:
        """A process that ends when its standard input does."""
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(
                command, stderr=None, env={"PATH": os.defpath}, start_new_session=True
            )
        self._processes.append(process)
        return process

    async def close(self) -> None:
        """End the processes outside, and remove the directory."""
        while self._processes:
            await self._processes.pop().aclose()


def _fill(directory: Path, files: Mapping[str, str]) -> None:
    """Make what every user may read, whatever the umask."""
    (directory / "door").mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    for path in (directory, *directory.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)


def find_open_place() -> str:
    """A directory for temporary files that every user can reach, as nobody must."""
    for place in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        path = Path(place).resolve()
        if all(each.stat().st_mode & 0o001 for each in (path, *path.parents)):
            return place
    return tempfile.gettempdir()


def limit_commands(max_processes: int | None, memory_mb: int | None) -> dict[str, int]:
    """The limits that a host sets for each command."""
    limits = {"CORE": 0}
    if max_processes is not None:
        limits["NPROC"] = max_processes
    if memory_mb is not None:
        # Not the address space: torch, node and Java reserve much that they never use.
        limits["DATA"] = memory_mb * MIB
    return limits
