"""The protocol of sandboxes and their providers, and what every implementation shares.

A sandbox runs commands and holds files; all else (a Python session, a shell, an editor, tests) is
made of ``exec``, ``read_file`` and ``write_file``, so it is the same on every provider.
"""

from __future__ import annotations

import io
import os
import shlex
import stat
import tarfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, Protocol

import anyio
import anyio.to_thread
import attrs

from rollout.clocks import monotonic
from rollout.errors import (
    SandboxError,
    SandboxLimit,
    SandboxLost,
    SandboxTimeout,
    SandboxUnsupported,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.sandbox.spec import SandboxSpec

Keep = Literal["head", "tail"]
MIB = 2**20
#: Exit codes of `_FILE_CHECK`, which are errnos, and the exceptions they mean.
_FILE_ERRORS: dict[int, type[OSError]] = {
    2: FileNotFoundError,
    13: PermissionError,
    20: NotADirectoryError,
    21: IsADirectoryError,
}
_READ = (
    '[ -d "$1" ] && exit 21; [ -e "$1" ] || exit 2; [ -f "$1" ] || exit 13; '
    '[ -r "$1" ] || exit 13; exec head -c "$2" -- "$1"'
)
_WRITE = (
    '[ -d "$1" ] && exit 21; [ -e "$1" ] && [ ! -f "$1" ] && exit 13; '
    'mkdir -p -- "$(dirname -- "$1")" 2>/dev/null || exit 13; { cat > "$1"; } 2>/dev/null || '
    'exit 13; [ -z "$2" ] || chmod "$2" -- "$1"'
)


@attrs.frozen(kw_only=True)
class ExecResult:
    """How a command ended.

    Attributes:
        exit_code: Its own; 128 + n where signal n ended it, 127 where there is no such program,
            126 where it cannot be run.
        stdout, stderr: What it wrote, each at most `max_output_bytes`.
        truncated: Whether one of them was longer.
        seconds: How long it ran.
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    seconds: float = 0.0


class SandboxProvider(Protocol):
    """Where sandboxes come from."""

    name: str
    #: How many sandboxes may be open at once unless somebody says otherwise.
    max_open: int

    async def check(self) -> None:
        """Find out whether it can be used here, before anything is opened.

        Raises:
            SandboxUnavailable: It cannot; what it lacks.
        """

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox; cancellation leaves none behind.

        Raises:
            SandboxUnsupported: The provider cannot do what the spec wants.
            SandboxUnavailable: It has none to give now.
            SandboxError: It could not be prepared.
        """

    async def sweep(self) -> int:
        """Remove what drivers that have died left behind; how many sandboxes."""

    async def close(self) -> None:
        """Let go of what the provider holds; its sandboxes are closed before."""


@attrs.frozen
class Command:
    """One command as an implementation runs it; everything is set."""

    argv: list[str]
    input: bytes
    cwd: str
    env: dict[str, str]
    user: str | None
    timeout_s: float | None
    max_output_bytes: int
    keep: Keep


class Sandbox:
    """A place for commands and files of one trajectory. Several tasks may use it at once.

    Relative paths are relative to `workdir`. Every method raises `SandboxLost` once the sandbox has
    ended or is closed.

    A provider's own has `_run` and `_close`, and may have faster ways for the rest. `_run` is
    cancelled from outside; it kills the command then.
    """

    #: Larger inputs of commands are refused.
    max_input_bytes = 64 * MIB

    def __init__(
        self,
        identity: str,
        *,
        workdir: str,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cleanup_s: float = 10.0,
    ) -> None:
        self.id = identity
        self.workdir = workdir
        self.env = dict(env or {})
        self.user = user
        self.cleanup_s = cleanup_s
        #: Whether closing did not end in time.
        self.is_leaked = False
        self._closing: anyio.Event | None = None
        self._host_urls: dict[str, str] = {}
        self._host_url_lock = anyio.Lock()

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        input: bytes | str = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int = MIB,
        keep: Keep = "tail",
    ) -> ExecResult:
        """Run a command to its end; a text is one for ``/bin/sh``.

        An exit code other than 0 is a result. What the command leaves in the background goes on
        until the sandbox is closed. Cancellation kills the command and all that it has started.

        Args:
            command: A program with its arguments, or a text.
            input: Its standard input.
            cwd: Where it starts; `workdir` by default.
            env: Variables on top of those of the sandbox.
            user: Whom it runs as.
            timeout_s: Seconds until it is killed; None: no limit.
            max_output_bytes: Of stdout and of stderr each; more is read and dropped.
            keep: Which end of longer output is kept.

        Raises:
            SandboxTimeout: With what was written so far; all that the command had started is
                killed.
            FileNotFoundError, NotADirectoryError, PermissionError: Of `cwd`.
            SandboxLimit: `input` is too large.
            SandboxUnsupported: The provider has no such user.
        """
        self.check_open()
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        data = input.encode() if isinstance(input, str) else bytes(input)
        if len(data) > self.max_input_bytes:
            raise SandboxLimit(
                f"the input of a command has {len(data)} bytes; at most {self.max_input_bytes} "
                "can be passed: write them to a file"
            )
        if not argv or any("\0" in word for word in argv):
            raise ValueError(f"command = {command!r:.200}: expected words without NUL")
        if keep not in ("head", "tail"):
            raise ValueError(f"keep = {keep!r}: expected 'head' or 'tail'")
        run = Command(
            argv,
            data,
            self.join(cwd or "."),
            {**self.env, **(env or {})},
            self.user if user is None else user,
            timeout_s,
            max(0, max_output_bytes),
            keep,
        )
        began = monotonic()
        result = await self._run(run)
        return attrs.evolve(result, seconds=monotonic() - began)

    async def read_file(self, path: str, *, max_bytes: int = 10 * MIB) -> bytes:
        """The content of a regular file.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError: As of ``open``.
            SandboxLimit: It has more than `max_bytes`.
        """
        self.check_open()
        return await self._read(self.join(path), max_bytes)

    async def write_file(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        """Write a file, and the directories that it lies in.

        Raises:
            IsADirectoryError, PermissionError, OSError: As of ``open``; ENOSPC where it is full.
        """
        self.check_open()
        content = data.encode() if isinstance(data, str) else bytes(data)
        await self._write(self.join(path), content, mode)

    async def upload(self, local: str | Path, path: str) -> None:
        """Copy a file or directory of this machine to `path`.

        Raises:
            SandboxError: There is a link or device among the files.
        """
        self.check_open()
        target = self.join(path)
        for relative, source, archive in await anyio.to_thread.run_sync(_pack, Path(local)):
            if source is not None:
                data = await anyio.to_thread.run_sync(source.read_bytes)
                mode = stat.S_IMODE(source.stat().st_mode)
                await self.write_file(
                    os.path.join(target, relative) if relative else target, data, mode=mode
                )
                continue
            words = ["/bin/sh", "-c", 'mkdir -p -- "$1" && tar -xf - -C "$1"', "sh", target]
            result = await self.exec(words, input=archive)
            if result.exit_code:
                raise SandboxError(f"upload to {path}: {_tell(result)}")

    async def download(self, path: str, local: str | Path, *, max_bytes: int = 64 * MIB) -> None:
        """Copy a file or directory to `local`, which must not exist.

        Raises:
            SandboxError: There is something other than regular files and directories among them.
            SandboxLimit: They have more than `max_bytes`.
        """
        target = Path(local)
        if os.path.lexists(target):  # noqa: ASYNC240  (at once)
            raise FileExistsError(17, "File exists", str(target))
        try:
            data = await self.read_file(path, max_bytes=max_bytes)
        except IsADirectoryError:
            pass
        else:
            await anyio.to_thread.run_sync(target.write_bytes, data)
            return
        result = await self.exec(
            ["tar", "-cf", "-", "-C", self.join(path), "."],
            max_output_bytes=max_bytes + max_bytes // 8 + MIB,  # the archive's own part
            keep="head",
        )
        if result.truncated:
            raise SandboxLimit(f"{path} has more than {max_bytes} bytes")
        if result.exit_code:
            raise SandboxError(f"download of {path}: {_tell(result)}")
        await anyio.to_thread.run_sync(_unpack, result.stdout, target, path, max_bytes)

    async def expose_port(self, port: int) -> str:
        """The URL that reaches a port of the sandbox from here.

        Raises:
            SandboxUnsupported: The provider cannot.
        """
        raise SandboxUnsupported(f"{self.id}: ports cannot be reached from outside")

    async def host_url(self, url: str) -> str:
        """The URL under which programs inside reach `url`, of a server on this machine.

        Raises:
            SandboxUnsupported: The provider cannot.
        """
        self.check_open()
        async with self._host_url_lock:
            if url not in self._host_urls:
                self._host_urls[url] = await self._host_url(url)
        return self._host_urls[url]

    async def snapshot(self) -> str:
        """Save the file system as an image for `SandboxSpec.image`.

        Raises:
            SandboxUnsupported: The provider cannot.
        """
        raise SandboxUnsupported(f"{self.id}: its file system cannot be saved as an image")

    async def close(self) -> None:
        """End the sandbox with all its processes and files. Idempotent, shielded and bounded."""
        if self._closing is not None:
            with anyio.CancelScope(shield=True):
                await self._closing.wait()
            return
        self._closing = anyio.Event()
        try:
            with anyio.move_on_after(self.cleanup_s, shield=True):
                self.is_leaked = True
                await self._close()
                self.is_leaked = False
        finally:
            self._closing.set()

    def check_open(self) -> None:
        """Raise `SandboxLost` once it is closed."""
        if self._closing is not None:
            raise SandboxLost(f"{self.id} is closed")

    def join(self, path: str) -> str:
        """An absolute path."""
        if not path or "\0" in path:
            raise ValueError(f"path = {path!r}: expected one without NUL")
        return os.path.join(self.workdir, path)

    async def prepare(self, spec: SandboxSpec) -> None:
        """Write the spec's files and run its setup.

        Raises:
            SandboxError: The setup failed.
        """
        for path, content in spec.files.items():
            if isinstance(content, Path):
                await self.upload(content, path)
            else:
                await self.write_file(path, content)
        if spec.setup is not None:
            try:
                result = await self.exec(spec.setup, timeout_s=spec.setup_s)
            except SandboxTimeout as error:
                raise SandboxError(f"the setup of {self.id}: {error}") from error
            if result.exit_code:
                raise SandboxError(f"the setup of {self.id}: {_tell(result)}")

    async def _run(self, command: Command) -> ExecResult:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError

    async def _read(self, path: str, max_bytes: int) -> bytes:
        words = ["/bin/sh", "-c", _READ, "sh", path, str(max_bytes + 1)]
        result = await self.exec(words, max_output_bytes=max_bytes + 1, keep="head")
        _raise_file_error(result, path)
        if len(result.stdout) > max_bytes:
            raise SandboxLimit(f"{path} has more than {max_bytes} bytes")
        return result.stdout

    async def _write(self, path: str, data: bytes, mode: int | None) -> None:
        words = ["/bin/sh", "-c", _WRITE, "sh", path, "" if mode is None else f"{mode:o}"]
        _raise_file_error(await self.exec(words, input=data), path)

    async def _host_url(self, url: str) -> str:
        raise SandboxUnsupported(f"{self.id}: no server of this machine can be reached from inside")


def _raise_file_error(result: ExecResult, path: str) -> None:
    code = result.exit_code
    if code in _FILE_ERRORS:
        raise _FILE_ERRORS[code](code, os.strerror(code), path)
    if code:
        raise OSError(5, _tell(result), path)


def _tell(result: ExecResult) -> str:
    said = (result.stderr or result.stdout)[-500:].decode(errors="replace").strip()
    return f"exit code {result.exit_code}: {said}" if said else f"exit code {result.exit_code}"


def cut(text: bytearray, cap: int, keep: Keep) -> bool:
    """Keep one end of a text that is longer than `cap` bytes; whether it was."""
    if len(text) <= cap:
        return False
    if keep == "head":
        del text[cap:]
    else:
        del text[: len(text) - cap]
    return True


def timed_out(command: Command, result: ExecResult) -> SandboxTimeout:
    """The error of a command that was killed for its timeout, with what it had written."""
    assert command.timeout_s is not None
    return SandboxTimeout(
        f"{shlex.join(command.argv):.200} timed out after {command.timeout_s:g} s",
        stdout=result.stdout,
        stderr=result.stderr,
        seconds=command.timeout_s,
    )


#: Larger files are uploaded by themselves, and archives end about there.
_ARCHIVE = 16 * MIB


def _pack(local: Path) -> list[tuple[str, Path | None, bytes]]:
    """What is uploaded in turn: a single file with its relative path, or an archive of several."""
    info = local.lstat()
    if stat.S_ISREG(info.st_mode):
        return [("", local, b"")]
    if not stat.S_ISDIR(info.st_mode):
        raise SandboxError(f"upload of {local}: neither a file nor a directory")
    parts: list[tuple[str, Path | None, bytes]] = []
    buffer = io.BytesIO()
    archive = tarfile.open(fileobj=buffer, mode="w")  # noqa: SIM115  (one after another)
    for root, folders, files in os.walk(local):
        for name in sorted([*folders, *files]):
            path = Path(root, name)
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) and not stat.S_ISDIR(info.st_mode):
                raise SandboxError(f"upload of {local}: {path} is a link or no regular file")
            relative = str(path.relative_to(local))
            if stat.S_ISREG(info.st_mode) and info.st_size > _ARCHIVE:
                parts.append((relative, path, b""))
                continue
            archive.add(path, relative, recursive=False, filter=_without_owner)
            if buffer.tell() > _ARCHIVE:
                archive.close()
                parts.append(("", None, buffer.getvalue()))
                buffer = io.BytesIO()
                archive = tarfile.open(fileobj=buffer, mode="w")  # noqa: SIM115
    archive.close()
    return [*parts, ("", None, buffer.getvalue())]


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _unpack(data: bytes, local: Path, path: str, max_bytes: int) -> None:
    """Extract an archive that the sandbox made: nothing in it is trusted."""
    try:
        archive = tarfile.open(fileobj=io.BytesIO(data))  # noqa: SIM115  (below)
        members = archive.getmembers()
    except tarfile.TarError as error:
        raise SandboxError(f"download of {path}: {error}") from error
    with archive:
        total = 0
        for member in members:
            parts = PurePosixPath(member.name).parts
            if member.name.startswith("/") or ".." in parts:
                raise SandboxError(f"download of {path}: {member.name!r} leads out of it")
            if (not member.isreg() and not member.isdir()) or member.issparse():
                raise SandboxError(f"download of {path}: {member.name!r} is no regular file")
            total += member.size
        if total > max_bytes:
            raise SandboxLimit(f"{path} has more than {max_bytes} bytes")
        local.mkdir(parents=True)
        for member in members:
            target = local.joinpath(*PurePosixPath(member.name).parts)
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            source = archive.extractfile(member)
            assert source is not None
            target.write_bytes(source.read())
            target.chmod(0o755 if member.mode & 0o100 else 0o644)
