"""Sandboxes on this machine: the driver's side of ``inside/host.py``, which tells the protocol.

One process a sandbox, which ends with the driver's end of its socket. Every request waits on a
socket of its own, so no task reads in the background.
"""

from __future__ import annotations

import itertools
import marshal
import os
import re
import shutil
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
from rollout.sandbox.api import MIB, Command, ExecResult, Sandbox, SandboxProvider, make_timeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anyio.abc import Process

    from rollout.config.sandbox_section import SandboxSpec

#: Where sandboxes see the sockets of a `Relay`.
RELAY_DIRECTORY = "/run/rollout"
#: Where every user may look, as nobody must, whatever ``TMPDIR`` is.
OPEN_DIRECTORY = "/tmp"
#: Runs the program that comes first through standard input: a text, or what a host has made of it.
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


class LocalSandbox(Sandbox):
    """A sandbox whose commands ``inside/host.py`` runs.

    Attributes:
        relay: Leads to servers of this machine; None where there is no way.
        compiled: The host's program as code of its interpreter.
    """

    relay: Relay | None = None

    def __init__(self, identity: str, process: Process, control: socket.socket, **shared: Any):
        super().__init__(identity, **shared)
        self._process, self._control = process, control
        self._sending = anyio.Lock()

    async def _begin(self, spec: SandboxSpec) -> None:
        """Wait until the host runs."""
        errors: Any = self._process.stderr
        async with errors:
            await anyio.wait_readable(self._control)
            with suppress(ConnectionResetError):  # it ended before it had read all
                self.compiled = self._control.recv(1 << 18)
                if self.compiled:
                    return
            text = b"".join([part async for part in errors]).decode(errors="replace")
        raise SandboxError(f"{self.id} does not start: {text.strip()[-1000:]}")

    async def _host_url(self, url: str) -> str:
        if self.relay is None:
            return await super()._host_url(url)
        return await self.relay.connect(self, url)

    async def _close(self) -> None:
        # The host ends with the socket, and with it all that it has started.
        anyio.notify_closing(self._control)
        self._control.close()
        with anyio.move_on_after(self.cleanup_s / 2):  # then it is killed
            await self._process.aclose()

    async def _run(self, command: Command) -> ExecResult:
        if command.user is not None:
            raise SandboxUnsupported(f"{self.id} has one user; user = {command.user!r}")
        keeps_tail, cap = command.keep == "tail", command.max_output_bytes
        request = command.argv, command.cwd, command.env, cap, keeps_tail
        with ExitStack() as stack:
            exchange = stack.enter_context(make_file(marshal.dumps(request, 2)))
            done, far_done = map(stack.enter_context, socket.socketpair())
            done.setblocking(False)
            source = stack.enter_context(_open_input(command.input))
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
            code, size, is_cut = map(int, exchange.readline().split())
            if code < 0:
                raise OSError(-code, os.strerror(-code), command.cwd)
            stdout, stderr = exchange.read(size), exchange.read()
        result = ExecResult(exit_code=code, stdout=stdout, stderr=stderr, truncated=bool(is_cut))
        if scope.cancelled_caught:
            raise make_timeout(command, result)
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


class LocalProvider(SandboxProvider):
    """What providers on this machine share."""

    max_open = 256
    sandbox_class: type[LocalSandbox] = LocalSandbox
    _numbers = itertools.count(1)
    _compiled = b""  # by the interpreter of this machine

    async def _start(
        self,
        spec: SandboxSpec,
        command: Sequence[str],
        *,
        workdir: str,
        env: Mapping[str, str],
        max_processes: int | None,
        memory_mb: int | None,
        remove: str = "",
        fds: Sequence[int] = (),
    ) -> LocalSandbox:
        """Start a host in a session of its own, and put in what the spec has.

        `command` ends in the interpreter that runs the host, and reads `fds`; the directory
        `remove` ends with the sandbox.
        """
        control, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        # Not the address space: torch, node and Java reserve much that they never use.
        limits = {"CORE": 0, "NPROC": max_processes, "DATA": memory_mb and memory_mb * MIB}
        program = self._compiled if spec.image is None else b""
        control.send(program or marshal.dumps(read_program("host"), 2))
        control.send(marshal.dumps((limits, remove), 2))
        try:
            with inner, anyio.CancelScope(shield=True):
                process = await anyio.open_process(
                    [*command, "-I", "-S", "-c", _START],
                    stdin=inner.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=tuple(fds),
                )
        except OSError as error:
            control.close()
            raise SandboxError(f"cannot run {command[0]!r}: {error.strerror}") from error
        sandbox = self.sandbox_class(
            f"{self.name}-{os.getpid()}-{next(self._numbers)}",
            process,
            control,
            workdir=workdir,
            env={**env, **spec.env},
        )
        await sandbox.prepare(spec)
        if spec.image is None:
            self._compiled = sandbox.compiled
        return sandbox


class _NoSandbox(LocalSandbox):
    async def expose_port(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    async def _host_url(self, url: str) -> str:
        return url


class NoneProvider(LocalProvider):
    """No sandbox: commands run as the driver's user, in a directory of their own.

    For trusted code, and where the machine or container is itself the wall. Commands can read and
    write what the driver can, and can reach its network. Closing removes the directory and every
    process that did not leave by itself, a driver's death too.
    """

    name = "none"
    sandbox_class = _NoSandbox

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        """See `SandboxProvider.open`."""
        spec.refuse_unsupported("sandbox provider none", ("network", "max_processes", "memory_mb"))
        directory = tempfile.mkdtemp(prefix=f"rollout-sandbox-{os.getpid()}-")
        path = os.environ.get("PATH", os.defpath)
        env = {"PATH": path, "HOME": directory, "LANG": "C.UTF-8", "TMPDIR": directory}
        try:
            return await self._start(
                spec,
                [sys.executable],
                workdir=directory,
                env=env,
                max_processes=spec.max_processes,
                memory_mb=spec.memory_mb,
                remove=directory,
            )
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise


class Relay:
    """Leads programs in sandboxes without a network to servers on this machine.

    ``inside/relay.py`` runs outside, where it has a Unix socket for each server in a directory that
    sandboxes see at `RELAY_DIRECTORY`, and in each sandbox that wants one, where it has a port.
    The one outside ends with this driver, and the directory with it.
    """

    def __init__(self, python: str = "python3") -> None:
        self._python = python
        self._process: Process | None = None
        self._directory = ""
        self._servers: set[str] = set()
        self._lock = anyio.Lock()

    async def open_directory(self) -> str:
        """The directory for sockets; the first call makes it."""
        async with self._lock:
            if self._process is None:
                prefix = f"rollout-relay-{os.getpid()}-"
                self._directory = tempfile.mkdtemp(prefix=prefix, dir=OPEN_DIRECTORY)
                os.chmod(self._directory, 0o755)
                command = [sys.executable, "-I", "-S", "-c", read_program("relay")]
                with anyio.CancelScope(shield=True):
                    self._process = await anyio.open_process(
                        [*command, "outside", self._directory], stderr=None, start_new_session=True
                    )
        return self._directory

    async def connect(self, sandbox: Sandbox, url: str) -> str:
        """The URL of a server of this machine as programs in the sandbox see it."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise SandboxUnsupported(f"{sandbox.id}: {url!r}: only http:// can be reached")
        server = f"{parts.hostname} {parts.port or 80}"
        name = re.sub(r"[^\w.-]", "_", server)
        await self.open_directory()
        async with self._lock:
            if server not in self._servers:
                process: Any = self._process
                with anyio.CancelScope(shield=True):
                    await process.stdin.send(f"{name} {server}\n".encode())
                    await process.stdout.receive()  # it listens
                self._servers.add(server)
        command = [self._python, "-I", "-S", "-", "inside", f"{RELAY_DIRECTORY}/{name}"]
        result = await sandbox.exec(command, input=read_program("relay"), timeout_s=60)
        if result.exit_code or not result.stdout.strip().isdigit():
            output = result.stderr[-500:].decode(errors="replace")
            raise SandboxError(f"{sandbox.id}: no relay to {url}: {output}")
        return urlunsplit(parts._replace(netloc=f"127.0.0.1:{int(result.stdout)}"))

    async def close(self) -> None:
        """End the process outside, which removes the directory."""
        if self._process is not None:
            await self._process.aclose()
            self._process = None


def make_file(data: bytes) -> BinaryIO:
    """A file in memory, at its beginning."""
    file = open(os.memfd_create("rollout"), "w+b", buffering=0)  # noqa: SIM115  (the caller's)
    file.write(data)
    file.seek(0)
    return file


def _open_input(data: bytes) -> BinaryIO:
    """Not an empty file: some programs take that for input."""
    return make_file(data) if data else open(os.devnull, "rb")
