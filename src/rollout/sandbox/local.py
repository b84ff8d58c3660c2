"""Sandboxes on this machine: the driver's side of ``inside/host.py``.

One process a sandbox, and one pipe in each direction, over which several commands are answered in
any order. No task reads in the background: whoever waits for an answer reads for all meanwhile.
"""

from __future__ import annotations

import json
import marshal
import os
import re
import signal
import struct
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import anyio

from rollout.errors import SandboxError, SandboxLimit, SandboxLost, SandboxUnsupported
from rollout.sandbox.api import MIB, Command, ExecResult, Sandbox, timed_out

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anyio.abc import Process

    from rollout.config.sandbox_section import SandboxSpec

_FILE_ERRORS: dict[str, type[OSError]] = {
    each.__name__: each
    for each in (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
}
_START = (
    "import marshal,os,sys;n=int(sys.argv[1]);p=b''\n"
    "while len(p)<n:p+=os.read(0,n-len(p)) or sys.exit()\n"
    "settings,program=marshal.loads(p)\n"
    "exec(marshal.loads(program) if type(program) is bytes else program)"
)
#: Compiles the host's program with the interpreter that runs it: as long as all else that it does.
_COMPILE = (
    "import marshal,sys\n"
    "code=compile(sys.stdin.buffer.read(),'host','exec',dont_inherit=True,optimize=2)\n"
    "sys.stdout.buffer.write(marshal.dumps(code))"
)
#: Seconds that a host has to answer once a command was killed.
_KILL_S = 5.0


@cache
def read_program(name: str) -> str:
    """The text of a program that runs inside."""
    return Path(__file__).with_name("inside").joinpath(f"{name}.py").read_text(encoding="utf-8")


class LocalSandbox(Sandbox):
    """A sandbox whose commands ``inside/host.py`` runs."""

    def __init__(
        self,
        identity: str,
        process: Process,
        *,
        workdir: str,
        env: Mapping[str, str],
        cleanup_s: float,
        relay: Relay | None = None,
    ) -> None:
        super().__init__(identity, workdir=workdir, env=env, cleanup_s=cleanup_s)
        self._process = process
        self._relay = relay
        self._received = bytearray()
        self._answers: dict[int, tuple[dict[str, Any], bytes]] = {}
        self._waiting: set[int] = {0}
        self._last_id = 0
        self._sending = anyio.Lock()
        self._receiving = anyio.Lock()

    async def begin(self, spec: SandboxSpec) -> None:
        """Wait until the host runs, and put in what the spec has; it is closed where that fails."""
        try:
            await self._greet()
            await self.prepare(spec)
        except BaseException:
            await self.close()
            raise

    async def _greet(self) -> None:
        """Wait until the host runs.

        Raises:
            SandboxError: It does not; with what it said instead.
        """
        try:
            await self._receive_answer(0)
        except SandboxLost as error:
            said = b""
            with anyio.move_on_after(_KILL_S), suppress(anyio.EndOfStream):
                assert self._process.stderr is not None
                while len(said) < MIB:
                    said += await self._process.stderr.receive()
            text = said.decode(errors="replace").strip() or str(error)
            raise SandboxError(f"{self.id} does not start: {text[-1000:]}") from error

    async def _run(self, command: Command) -> ExecResult:
        if command.user is not None:
            raise SandboxUnsupported(f"{self.id} has one user; user = {command.user!r}")
        request = {
            "do": "exec",
            "argv": command.argv,
            "cwd": command.cwd,
            "env": command.env,
            "cap": command.max_output_bytes,
            "keep": command.keep,
        }
        number = await self._send(request, command.input)
        try:
            with anyio.move_on_after(command.timeout_s) as scope:
                head, body = await self._receive_answer(number)
            if not scope.cancelled_caught:
                return _read_result(head, body, command.cwd)
            with anyio.move_on_after(_KILL_S, shield=True):
                head, body = await self._kill(number)
                raise timed_out(command, _read_result(head, body, command.cwd))
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(_KILL_S, shield=True), suppress(SandboxLost, OSError):
                await self._kill(number)
            raise
        finally:
            self._waiting.discard(number)
            self._answers.pop(number, None)
        raise SandboxLost(f"{self.id} does not answer")

    async def _kill(self, target: int) -> tuple[dict[str, Any], bytes]:
        await self._send({"do": "kill", "target": target}, is_answered=False)
        return await self._receive_answer(target)

    async def _read(self, path: str, max_bytes: int) -> bytes:
        data = bytearray()
        while len(data) <= max_bytes:
            size = min(MIB, max_bytes + 1 - len(data))
            part = await self._call({"do": "read", "path": path, "offset": len(data), "size": size})
            data += part
            if not part:
                return bytes(data)
        raise SandboxLimit(f"{path} has more than {max_bytes} bytes")

    async def _write(self, path: str, data: bytes, mode: int | None) -> None:
        for start in range(0, max(len(data), 1), MIB):
            request = {"do": "write", "path": path, "append": start > 0, "mode": mode}
            await self._call(request, data[start : start + MIB])

    async def _close(self) -> None:
        # The host ends with its standard input, and with it all that it has started.
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with suppress(OSError, anyio.BrokenResourceError):
                    await stream.aclose()
        with anyio.move_on_after(self.cleanup_s / 2):
            await self._process.wait()
            return
        kill_with_children(self._process.pid)
        await self._process.wait()

    async def _host_url(self, url: str) -> str:
        if self._relay is None:
            return url
        return await self._relay.connect(self, url)

    async def _call(self, request: dict[str, Any], body: bytes = b"") -> bytes:
        number = await self._send(request, body)
        try:
            head, answer = await self._receive_answer(number)
        finally:
            self._waiting.discard(number)
            self._answers.pop(number, None)
        _raise_error(head, answer, request["path"])
        return answer

    async def _send(
        self, request: dict[str, Any], body: bytes = b"", *, is_answered: bool = True
    ) -> int:
        """Send a whole frame, whatever happens to the caller: half a one would be the last."""
        self._last_id += 1
        number = self._last_id
        if is_answered:
            self._waiting.add(number)
        header = marshal.dumps({**request, "id": number}, 2)
        frame = struct.pack("<II", len(header), len(body)) + header + body
        assert self._process.stdin is not None
        try:
            async with self._sending:
                with anyio.CancelScope(shield=True):
                    await self._process.stdin.send(frame)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            self._waiting.discard(number)
            raise SandboxLost(f"{self.id} has ended") from error
        except BaseException:
            self._waiting.discard(number)
            raise
        return number

    async def _receive_answer(self, number: int) -> tuple[dict[str, Any], bytes]:
        assert self._process.stdout is not None
        while number not in self._answers:
            async with self._receiving:
                if number in self._answers:
                    break
                try:
                    self._received += await self._process.stdout.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError, OSError) as error:
                    raise SandboxLost(f"{self.id} has ended") from error
                except anyio.ClosedResourceError as error:
                    raise SandboxLost(f"{self.id} is closed") from error
                self._take_frames()
        return self._answers.pop(number)

    def _take_frames(self) -> None:
        while len(self._received) >= 8:
            head, body = struct.unpack_from("<II", self._received)
            end = 8 + head + body
            if len(self._received) < end:
                return
            header = json.loads(self._received[8 : 8 + head])
            if header["id"] in self._waiting:
                self._answers[header["id"]] = header, bytes(self._received[8 + head : end])
            del self._received[:end]


def _read_result(head: dict[str, Any], body: bytes, cwd: str) -> ExecResult:
    _raise_error(head, body, cwd)
    length = head["out"]
    return ExecResult(
        exit_code=head["exit"],
        stdout=body[:length],
        stderr=body[length:],
        truncated=head["truncated"],
    )


def _raise_error(head: dict[str, Any], body: bytes, path: str) -> None:
    if "error" in head:
        kind = _FILE_ERRORS.get(head["error"], OSError)
        raise kind(head["errno"], body.decode(errors="replace"), path)


def kill_with_children(pid: int) -> None:
    """Kill a process that does not end, and its children: bubblewrap's own child is process 1."""
    children = ""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    for each in [*map(int, children.split()), pid]:
        with suppress(OSError):
            os.kill(each, signal.SIGKILL)


async def compile_host(python: str) -> bytes | None:
    """The host's program as code of this interpreter; None where it cannot be run from here."""
    command = [python, "-I", "-S", "-c", _COMPILE]
    try:
        done = await anyio.run_process(command, input=read_program("host").encode(), check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


async def run_host(
    wrapper: Sequence[str],
    python: str,
    settings: dict[str, Any],
    *,
    compiled: bytes | None = None,
    fds: Sequence[int] = (),
) -> Process:
    """Start a host in a session of its own, as the last part of the command `wrapper`.

    The program comes through standard input, so that ``ps`` inside shows a short line.

    Args:
        compiled: Of `compile_host`, by this `python`; None: it compiles the program itself.
    """
    program = marshal.dumps([settings, compiled or read_program("host")], 2)
    command = [*wrapper, python, "-I", "-S", "-c", _START, str(len(program))]
    with anyio.CancelScope(shield=True):
        try:
            process = await anyio.open_process(command, start_new_session=True, pass_fds=tuple(fds))
        except OSError as error:
            raise SandboxError(f"cannot run {command[0]!r}: {error.strerror}") from error
        assert process.stdin is not None
        with suppress(anyio.BrokenResourceError, OSError):  # `greet` says what it died of
            await process.stdin.send(program)
    return process


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
        self._janitor: Process | None = None
        self._processes: dict[str, Process] = {}
        self._lock = anyio.Lock()

    async def open_directory(self, files: Mapping[str, str] | None = None) -> Path:
        """The directory, in which ``door`` is for sockets; made once, with `files` in it."""
        async with self._lock:
            if self._directory is None:
                directory = Path(
                    tempfile.mkdtemp(prefix=f"rollout-door-{os.getpid()}-", dir=_find_open_place())
                )
                command = ["/bin/sh", "-c", 'cat >/dev/null; exec rm -rf -- "$1"', "sh"]
                with anyio.CancelScope(shield=True):
                    self._janitor = await anyio.open_process(
                        [*command, str(directory)],
                        stdout=None,
                        stderr=None,
                        env={"PATH": os.defpath},
                        start_new_session=True,
                    )
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
        directory = await self.open_directory()
        async with self._lock:
            if server not in self._processes:
                self._processes[server] = await self._listen(directory / "door" / name, server)
        words = ["tcp:127.0.0.1:0", f"unix:{self._inside}/{name}", "detach"]
        command = [self._python, "-I", "-S", "-", *words]
        result = await sandbox.exec(command, input=read_program("relay"), timeout_s=60)
        if result.exit_code or not result.stdout.strip().isdigit():
            said = result.stderr[-500:].decode(errors="replace")
            raise SandboxError(f"{sandbox.id}: no relay to {url}: {said}")
        port = int(result.stdout)
        return urlunsplit(parts._replace(netloc=f"127.0.0.1:{port}"))

    async def _listen(self, path: Path, server: str) -> Process:
        words = [sys.executable, "-I", "-S", "-c", read_program("relay")]
        words += [f"unix:{path}", f"tcp:{server}"]
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(words, stderr=None, start_new_session=True)
            assert process.stdout is not None
            try:
                await process.stdout.receive()
            except anyio.EndOfStream:
                await process.aclose()
                raise SandboxError(f"no relay to {server}") from None
        return process

    async def close(self) -> None:
        """End the processes outside, and remove the directory."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            await process.aclose()
        self._processes.clear()
        if self._janitor is not None:
            await self._janitor.aclose()
            self._janitor = None


def _fill(directory: Path, files: Mapping[str, str]) -> None:
    """Make what every user may read, whatever the umask."""
    directory.chmod(0o755)
    (directory / "door").mkdir()
    (directory / "door").chmod(0o755)
    for name, text in files.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o644)


def _find_open_place() -> str:
    """A directory for temporary files that every user can reach, as nobody must."""
    for place in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        path = Path(place).resolve()
        if all(each.stat().st_mode & 0o001 for each in (path, *path.parents)):
            return place
    return tempfile.gettempdir()


def limits_of(*, max_processes: int | None, memory_mb: int | None) -> dict[str, int]:
    """The limits that a host sets for each command."""
    limits = {"CORE": 0}
    if max_processes is not None:
        limits["NPROC"] = max_processes
    if memory_mb is not None:
        # Not the address space: torch, node and Java reserve much that they never use.
        limits["DATA"] = memory_mb * MIB
    return limits
