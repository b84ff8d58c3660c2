"""What adapters to the SDKs of remote sandboxes share; these run on asyncio alone."""

from __future__ import annotations

import base64
import importlib
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import sniffio

from rollout.errors import (
    SandboxError,
    SandboxLimit,
    SandboxLost,
    SandboxUnavailable,
    SandboxUnsupported,
)
from rollout.sandbox.api import (
    _READ,
    MIB,
    Command,
    ExecResult,
    Sandbox,
    _raise_file_error,
    _unpack,
    cut,
    timed_out,
)
from rollout.sandbox.containers import _CWD_ERRORS, _ENTER, _KILL, _KILL_S, _MARK, _SPARE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.sandbox.api import Keep
    from rollout.sandbox.spec import SandboxSpec

_READ_AS_TEXT = _READ.replace("exec head", "head") + " | base64"


class Output:
    """The bounded ends or beginnings of stdout and stderr, which outlast a cancellation."""

    def __init__(self, cap: int, keep: Keep) -> None:
        self._cap, self._keep = cap, keep
        self._texts = bytearray(), bytearray()
        self._truncated = False

    def add(self, number: int, data: bytes | str) -> None:
        """Take more of stdout (0) or stderr (1)."""
        text = self._texts[number]
        text += data.encode() if isinstance(data, str) else data
        if self._keep == "head" or len(text) > 2 * self._cap + MIB:
            self._cut(text)

    def result(self, exit_code: int) -> ExecResult:
        """What there is."""
        for text in self._texts:
            self._cut(text)
        stdout, stderr = map(bytes, self._texts)
        return ExecResult(
            exit_code=exit_code, stdout=stdout, stderr=stderr, truncated=self._truncated
        )

    def _cut(self, text: bytearray) -> None:
        self._truncated |= cut(text, self._cap, self._keep)


class RemoteSandbox(Sandbox):
    """A sandbox of an SDK; an implementation has `_call` and `_close`.

    Attributes:
        is_text: Whether the SDK gives output as text, with bytes that are no UTF-8 replaced.
        lost_errors: What it raises where the sandbox has ended.
    """

    is_text = False
    lost_errors: tuple[type[Exception], ...] = ()
    _count = 0

    async def _call(self, argv: list[str], data: bytes, user: str | None, output: Output) -> int:
        """Run a command to its end, in any directory; its exit code."""
        raise NotImplementedError

    async def _run(self, command: Command) -> ExecResult:
        self._count += 1
        mark = f"{_MARK}={self.id}-{self._count}."
        words = ["env", mark, *(f"{name}={value}" for name, value in command.env.items())]
        words += ["/bin/sh", "-c", _ENTER, "sh", mark, command.cwd]
        if command.timeout_s is not None:
            words += ["timeout", "-k", "5", str(math.ceil(command.timeout_s) + _SPARE_S)]
        output = Output(command.max_output_bytes, command.keep)
        try:
            with anyio.move_on_after(command.timeout_s) as scope:
                code = await self._call(
                    [*words, *command.argv], command.input, command.user, output
                )
        except anyio.get_cancelled_exc_class():
            await self._kill(mark, command.user)
            raise
        except SandboxError:
            raise
        except Exception as error:  # the SDK's own, or its transport's
            while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            kind = SandboxLost if isinstance(error, self.lost_errors) else SandboxError
            raise kind(f"{self.id}: {type(error).__name__}: {error}") from error
        if scope.cancelled_caught:
            await self._kill(mark, command.user)
            raise timed_out(command, output.result(-1))
        result = output.result(code)
        if code == 125 and result.stderr.startswith(mark.encode()):
            number = result.stderr.split()[-1].decode()
            raise _CWD_ERRORS[number](int(number), os.strerror(int(number)), command.cwd)
        return result

    async def _kill(self, mark: str, user: str | None) -> None:
        with anyio.move_on_after(_KILL_S, shield=True), suppress(Exception):
            await self._call(["/bin/sh", "-c", _KILL, "sh", mark], b"", user, Output(0, "head"))

    async def _read(self, path: str, max_bytes: int) -> bytes:
        if not self.is_text:
            return await super()._read(path, max_bytes)
        words = ["/bin/sh", "-c", _READ_AS_TEXT, "sh", path, str(max_bytes + 1)]
        result = await self.exec(words, max_output_bytes=2 * max_bytes + MIB, keep="head")
        _raise_file_error(result, path)
        data = base64.b64decode(result.stdout)
        if len(data) > max_bytes:
            raise SandboxLimit(f"{path} has more than {max_bytes} bytes")
        return data

    async def download(self, path: str, local: str | Path, *, max_bytes: int = 64 * MIB) -> None:
        """See `Sandbox.download`; an archive is a file where output is text."""
        result = await self.exec(["test", "-d", self.join(path)])
        if not self.is_text or result.exit_code:
            return await super().download(path, local, max_bytes=max_bytes)
        if os.path.lexists(local):  # noqa: ASYNC240  (at once)
            raise FileExistsError(17, "File exists", str(local))
        archive = f"/tmp/.rollout-{self._count}.tar"
        script = 'tar -cf "$1" -C "$2" .'
        result = await self.exec(["/bin/sh", "-c", script, "sh", archive, self.join(path)])
        if result.exit_code:
            raise SandboxError(f"download of {path}: {result.stderr[-500:].decode()}")
        try:
            data = await self.read_file(archive, max_bytes=max_bytes + max_bytes // 8 + MIB)
        finally:
            await self.exec(["rm", "-f", archive])
        await anyio.to_thread.run_sync(_unpack, data, Path(local), path, max_bytes)
        return None


def import_sdk(provider: str, module: str, extra: str) -> Any:
    """The SDK of a provider.

    Raises:
        SandboxUnavailable: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SandboxUnavailable(
            f"sandbox provider {provider} needs the package {extra}: {error}"
        ) from error


def check_asyncio(provider: str) -> None:
    """Refuse to run on trio.

    Raises:
        SandboxUnsupported: On trio.
    """
    if sniffio.current_async_library() != "asyncio":
        raise SandboxUnsupported(
            f"sandbox provider {provider}: its SDK runs on asyncio alone; open the runtime on "
            'asyncio: anyio.run(main, backend="asyncio"), or open_rollout_blocking'
        )


async def prepare(sandbox: RemoteSandbox, spec: SandboxSpec) -> RemoteSandbox:
    """The sandbox with the spec's files and setup; it is closed where that fails."""
    try:
        result = await sandbox.exec(["mkdir", "-p", sandbox.workdir], cwd="/")
        if result.exit_code:
            raise SandboxError(f"{sandbox.id}: {result.stderr[-500:].decode(errors='replace')}")
        await sandbox.prepare(spec)
    except BaseException:
        await sandbox.close()
        raise
    return sandbox


def read_options(provider: str, spec: SandboxSpec, known: Sequence[str]) -> dict[str, Any]:
    """`SandboxSpec.options`, all of them known.

    Raises:
        SandboxUnsupported: One is not.
    """
    for name in spec.options:
        if name not in known:
            raise SandboxUnsupported(
                f"sandbox provider {provider}: unknown options[{name!r}]; known: {', '.join(known)}"
            )
    return dict(spec.options)
