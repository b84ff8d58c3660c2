"""The protocol of sandboxes and their providers, and what every implementation shares.

A sandbox runs commands and holds files; all else (a Python session, a shell, an editor, tests) is
made of ``exec``, ``read_file`` and ``write_file``, so it is the same on every provider.
"""

from __future__ import annotations

import io
import math
import os
import shlex
import stat
import tarfile
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio
import attrs

from rollout.clocks import monotonic
from rollout.errors import (
    SandboxError,
    SandboxLimit,
    SandboxLost,
    SandboxTimeout,
    SandboxUnsupported,
)
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.config.sandbox_section import SandboxSpec

Keep = Literal["head", "tail"]
MIB = 2**20
#: Scripts give the reason why a file cannot be read or written as an errno, by their exit code: no
#: such file, refused, not a directory, a directory, no space.
_ERRNOS = (2, 13, 20, 21, 28)
#: Ends unless its first argument is a file that can be read.
CHECK_FILE = (
    '[ -d "$1" ] && exit 21; [ -e "$1" ] || exit 2; { [ -f "$1" ] && [ -r "$1" ]; } || exit 13; '
)
_READ = CHECK_FILE + 'exec head -c "$2" -- "$1"'
_WRITE = (
    '[ -d "$1" ] && exit 21; [ -e "$1" ] && [ ! -f "$1" ] && exit 13; '
    'mkdir -p -- "$(dirname -- "$1")" 2>/dev/null || exit 13; { true > "$1"; } 2>/dev/null || '
    'exit 13; e=$(cat 2>&1 > "$1") || case $e in *"No space"*) exit 28;; *) exit 5;; esac; '
    '[ -z "$2" ] || chmod "$2" -- "$1"'
)
_UNPACK = 'mkdir -p -- "$1" && tar -xf - -C "$1"'
_DESCRIBE = (
    'if [ -L "$1" ]; then echo link; elif [ -d "$1" ]; then echo directory; '
    'elif [ -x "$1" ]; then echo program; fi'
)
#: Into a file, since what providers hand on may be text alone; of no more than $2 bytes, or it is
#: none. A plain shell tells the exit code of a pipe's last command alone: tar's is written down.
_PACK = (
    'f=$(mktemp) || exit 1; c=$({ { tar -cf - -C "$1" . || echo "$?" >&3; } | '
    'head -c "$(($2 + 1))" >"$f"; } 3>&1); h=$?; [ "$(wc -c <"$f")" -le "$2" ] || c=27; '
    '[ "$h$c" = 0 ] && echo "$f" || { rm -f "$f"; exit "${c:-$h}"; }'
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


class SandboxProvider:
    """Where sandboxes come from; one of somebody else's has `open`, and what else it needs.

    Attributes:
        name: As in ``sandbox.provider``.
        max_open: How many sandboxes may be open at once where the configuration names no bound.
    """

    name: str
    max_open = 64

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
        raise NotImplementedError

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
    """Commands and files of one trajectory. Several tasks may use it at once.

    Relative paths are relative to `workdir`. Every method raises `SandboxLost` once the sandbox has
    ended or is closed.

    A provider's own has `_run` and `_close`, and may have faster ways for the rest. `_run` is
    cancelled from outside; it kills the command then.
    """

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
            SandboxUnsupported: The provider has no such user.
        """
        self.check_open()
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        if not argv or not all(isinstance(word, str) and "\0" not in word for word in argv):
            raise ValueError(f"command = {command!r:.200}: expected words without NUL")
        if not (timeout_s is None or (isinstance(timeout_s, Real) and timeout_s > -math.inf)):
            raise ValueError(f"timeout_s = {timeout_s!r:.80}: expected seconds, or None")
        variables = {**self.env, **(env or {})}
        for name, value in variables.items():
            if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
                raise ValueError(f"env[{name!r}] = {value!r:.80}: expected texts, and a name")
        prepared = Command(
            argv,
            input.encode() if isinstance(input, str) else bytes(input),
            self.join(cwd or "."),
            variables,
            self.user if user is None else user,
            timeout_s,
            max(0, max_output_bytes),
            keep,
        )
        began = monotonic()
        result = await self._run(prepared)
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
        data, mode = await run_in_thread(_read_local, Path(local))
        if mode is not None:
            await self.write_file(path, data, mode=mode)
        else:
            result = await self._run_script(_UNPACK, self.join(path), data=data)
            check_exit(result, f"upload to {path}")

    async def download(self, path: str, local: str | Path, *, max_bytes: int = 64 * MIB) -> None:
        """Copy a file or directory to `local`, which must not exist.

        Raises:
            SandboxError: There is something other than regular files and directories among them,
                such as a link, which is not followed.
            SandboxLimit: They have more than `max_bytes`.
        """
        target, source = Path(local), os.path.normpath(self.join(path))  # noqa: ASYNC240
        if os.path.lexists(target):  # noqa: ASYNC240  (at once)
            raise FileExistsError(17, "File exists", str(target))
        kind = (await self._run_script(_DESCRIBE, source)).stdout.strip()
        if kind == b"link":
            raise SandboxError(f"download of {path}: it is a link, no regular file")
        if kind != b"directory":
            data = await self.read_file(source, max_bytes=max_bytes)
            mode = 0o755 if kind == b"program" else 0o644
            return await run_in_thread(_write_local, target, data, mode)
        # It may be larger than its files by an eighth and a MiB.
        most = max_bytes + max_bytes // 8 + MIB
        packed = await self._run_script(_PACK, source, str(most))
        if packed.exit_code == 27:
            raise SandboxLimit(f"{path} has more than {max_bytes} bytes")
        check_exit(packed, f"download of {path}")
        archive = packed.stdout.decode().strip()
        try:
            data = await self.read_file(archive, max_bytes=most)
        finally:
            await self.exec(["rm", "-f", archive])
        return await run_in_thread(_unpack, data, target, path, max_bytes)

    async def expose_port(self, port: int) -> str:
        """The URL that reaches a port of the sandbox from here; else `SandboxUnsupported`."""
        raise SandboxUnsupported(f"{self.id}: ports cannot be reached from outside")

    async def host_url(self, url: str) -> str:
        """The URL under which programs inside reach a server of this machine that has `url` here.

        Raises:
            SandboxUnsupported: They cannot.
        """
        self.check_open()
        if url not in self._host_urls:
            self._host_urls[url] = await self._host_url(url)
        return self._host_urls[url]

    async def snapshot(self) -> str:
        """Save the file system as an image for `SandboxSpec.image`; else `SandboxUnsupported`."""
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
        """Write the spec's files and run its setup; it is closed where that fails.

        Raises:
            SandboxError: The setup failed.
        """
        try:
            await self._begin(spec)
            for path, content in spec.files.items():
                if isinstance(content, Path):
                    await self.upload(content, path)
                else:
                    await self.write_file(path, content)
            if spec.setup is not None:
                result = await self.exec(spec.setup, timeout_s=spec.setup_s)
                check_exit(result, f"the setup of {self.id}")
        except SandboxTimeout as error:
            await self.close()
            raise SandboxError(f"the setup of {self.id}: {error}") from error
        except BaseException:
            await self.close()
            raise

    async def _begin(self, spec: SandboxSpec) -> None:
        """What comes before files and setup."""

    async def _run(self, command: Command) -> ExecResult:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError

    async def _host_url(self, url: str) -> str:
        raise SandboxUnsupported(f"{self.id}: no server of this machine can be reached from inside")

    async def _read(self, path: str, max_bytes: int) -> bytes:
        words = path, str(max_bytes + 1)
        result = await self._run_script(_READ, *words, max_bytes=max_bytes + 1)
        check_file(result, path)
        if len(result.stdout) > max_bytes:
            raise SandboxLimit(f"{path} has more than {max_bytes} bytes")
        return result.stdout

    async def _write(self, path: str, data: bytes, mode: int | None) -> None:
        text = "" if mode is None else f"{mode:o}"
        check_file(await self._run_script(_WRITE, path, text, data=data), path)

    async def _run_script(
        self, script: str, *words: str, data: bytes = b"", max_bytes: int = MIB
    ) -> ExecResult:
        command = ["/bin/sh", "-c", script, "sh", *words]
        return await self.exec(command, input=data, max_output_bytes=max_bytes, keep="head")


def check_exit(result: ExecResult, action: str) -> None:
    """Raise a `SandboxError` with the end of a command's output where its exit code is not 0."""
    if result.exit_code:
        raise SandboxError(f"{action}: {_describe(result)}")


def check_file(result: ExecResult, path: str) -> None:
    """Raise the `OSError` that the exit code of a script for a file means."""
    code = result.exit_code
    if code:
        reason = os.strerror(code) if code in _ERRNOS else _describe(result)
        raise OSError(code if code in _ERRNOS else 5, reason, path)


def _describe(result: ExecResult) -> str:
    output = (result.stderr or result.stdout)[-500:].decode(errors="replace").strip()
    return f"exit code {result.exit_code}: {output}".removesuffix(": ")


def make_timeout(command: Command, result: ExecResult) -> SandboxTimeout:
    """The error of a command that was killed for its timeout, with what it had written."""
    assert command.timeout_s is not None
    return SandboxTimeout(
        f"{shlex.join(command.argv):.200} timed out after {command.timeout_s:g} s",
        stdout=result.stdout,
        stderr=result.stderr,
        seconds=command.timeout_s,
    )


def _read_local(local: Path) -> tuple[bytes, int | None]:
    """A file and its mode; of a directory an archive, of nobody in particular, and None."""
    info = local.lstat()
    is_tree = stat.S_ISDIR(info.st_mode)
    for path in [local, *(local.rglob("*") if is_tree else ())]:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise SandboxError(f"upload of {local}: {path} is a link or no regular file")
    if not is_tree:
        return local.read_bytes(), stat.S_IMODE(info.st_mode)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(local.iterdir()):
            archive.add(path, path.name, filter=_drop_owner)
    return buffer.getvalue(), None


def _drop_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _write_local(local: Path, data: bytes, mode: int) -> None:
    local.write_bytes(data)
    local.chmod(mode)


def _unpack(data: bytes, local: Path, path: str, max_bytes: int) -> None:
    """Extract an archive that the sandbox made: nothing in it is trusted."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            members = archive.getmembers()
            for member in members:
                is_inside = not {"..", "/"} & set(Path(member.name).parts)
                if not is_inside or not (member.isreg() or member.isdir()):
                    raise SandboxError(f"download of {path}: {member.name!r} is no regular file")
                is_program = member.isdir() or member.mode & 0o100
                _drop_owner(member).mode = 0o755 if is_program else 0o644
            if sum(member.size for member in members) > max_bytes:
                raise SandboxLimit(f"{path} has more than {max_bytes} bytes")
            archive.extraction_filter = lambda member, path: member  # they are as they are to be
            archive.extractall(local)
    except tarfile.TarError as error:
        raise SandboxError(f"download of {path}: {error}") from error
