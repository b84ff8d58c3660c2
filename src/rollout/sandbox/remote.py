"""What sandboxes share whose commands go through somebody else's ``exec``: containers and SDKs."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import attrs
import sniffio

from rollout.errors import (
    SandboxError,
    SandboxLimit,
    SandboxLost,
    SandboxUnavailable,
    SandboxUnsupported,
)
from rollout.lazy import import_extra
from rollout.sandbox.api import (
    CHECK_FILE,
    Command,
    ExecResult,
    Sandbox,
    SandboxProvider,
    check_exit,
    check_file,
    make_timeout,
)

if TYPE_CHECKING:
    from rollout.config.sandbox_section import SandboxSpec
    from rollout.sandbox.api import Keep

#: Seconds in which a command must be killed.
_KILL_S = 10.0
#: Runs a command in a directory; where that cannot be, says why after the command's mark.
_ENTER = (
    'cd -- "$2" 2>/dev/null || { c=13; [ -e "$2" ] || c=2; [ -f "$2" ] && c=20; '
    'echo "$1" >&2; exit $((c + 100)); }; shift 2; exec "$@"'
)
#: Kills all that has a mark in its environment, however it has detached itself.
_KILL = (
    "for i in 1 2 3 4 5 6 7 8; do found=; for p in /proc/[0-9]*; do "
    'case "$(cat "$p/environ" 2>/dev/null)" in '
    '*"$1"*) kill -9 "${p#/proc/}" 2>/dev/null && found=1;; esac; '
    'done; [ "$found" ] || exit 0; done'
)
_FIND_WORKDIR = '[ -z "$1" ] || { mkdir -p -- "$1" && cd -- "$1"; } && pwd'


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
        excess = len(text) - self._cap
        if excess > 0:
            self._truncated = True
            del text[slice(self._cap, None) if self._keep == "head" else slice(excess)]

    def result(self, exit_code: int) -> ExecResult:
        """What there is."""
        stdout, stderr = map(bytes, self._texts)
        return ExecResult(
            exit_code=exit_code, stdout=stdout, stderr=stderr, truncated=self._truncated
        )


class RemoteSandbox(Sandbox):
    """One that runs a command by `_call`; an implementation also has `_close`.

    Commands and all that they start bear a mark in their environment, by which they are killed.

    Attributes:
        is_text: Whether output is text, with bytes that are no UTF-8 replaced; `_fetch` reads files
            then.
        lost_errors: What `_call` raises where the sandbox has ended.
    """

    is_text = False
    lost_errors: tuple[type[Exception], ...] = ()

    def __init__(self, identity: str) -> None:
        super().__init__(identity, workdir=".", cleanup_s=30.0)
        self._count = 0

    async def _call(self, command: Command, output: Output) -> int:
        """Run an argv with its input as its user to its end, wherever; the exit code."""
        raise NotImplementedError

    async def _fetch(self, path: str) -> bytes:
        """The content of a file."""
        raise NotImplementedError

    async def _begin(self, spec: SandboxSpec) -> None:
        self.env, self.user = dict(spec.env), spec.user
        result = await self._run_script(_FIND_WORKDIR, spec.workdir or "")
        check_exit(result, f"the workdir of {self.id}")
        self.workdir = result.stdout.decode().strip() or "/"

    async def _run(self, command: Command) -> ExecResult:
        self._count += 1
        mark = f"ROLLOUT_EXEC={self.id}-{self._count}."
        words = ["env", mark, *(f"{name}={value}" for name, value in command.env.items())]
        words += ["/bin/sh", "-c", _ENTER, "sh", mark, command.cwd]
        output = Output(command.max_output_bytes, command.keep)
        code = None
        try:
            with anyio.move_on_after(command.timeout_s):
                code = await self._call(attrs.evolve(command, argv=words + command.argv), output)
        except SandboxError:
            raise
        except Exception as error:  # the SDK's own, or its transport's
            while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            kind = SandboxLost if isinstance(error, self.lost_errors) else SandboxError
            raise kind(f"{self.id}: {type(error).__name__}: {error}") from error
        finally:
            if code is None:
                kill = attrs.evolve(command, argv=["/bin/sh", "-c", _KILL, "sh", mark], input=b"")
                with anyio.move_on_after(_KILL_S, shield=True), suppress(Exception):
                    await self._call(kill, Output(0, "head"))
        if code is None:
            raise make_timeout(command, output.result(-1))
        result = output.result(code)
        if code > 100 and result.stderr == f"{mark}\n".encode():
            raise OSError(code - 100, os.strerror(code - 100), command.cwd)
        return result

    async def _read(self, path: str, max_bytes: int) -> bytes:
        if not self.is_text:
            return await super()._read(path, max_bytes)
        result = await self._run_script(CHECK_FILE + 'exec wc -c <"$1"', path)
        check_file(result, path)
        if int(result.stdout) > max_bytes:
            raise SandboxLimit(f"{path} has more than {max_bytes} bytes")
        return await self._fetch(path)


class RemoteProvider(SandboxProvider):
    """Asks an SDK, which runs on asyncio alone; an implementation has `_create`.

    Attributes:
        supported: The fields of `SandboxSpec` that it knows.
        options: The keys of `SandboxSpec.options` that it knows.
    """

    supported: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    async def _create(self, spec: SandboxSpec) -> RemoteSandbox:
        """A sandbox that is there; this is never cancelled."""
        raise NotImplementedError

    async def check(self) -> None:
        """See `SandboxProvider.check`; trio is refused."""
        if sniffio.current_async_library() != "asyncio":
            raise SandboxUnsupported(
                f"sandbox provider {self.name}: its SDK runs on asyncio alone; open the runtime "
                'on asyncio: anyio.run(main, backend="asyncio"), or open_rollout_blocking'
            )

    async def open(self, spec: SandboxSpec) -> RemoteSandbox:
        """See `SandboxProvider.open`."""
        spec.refuse_unsupported(f"sandbox provider {self.name}", self.supported, self.options)
        try:
            with anyio.CancelScope(shield=True):  # until it has an id by which it can be ended
                sandbox = await self._create(spec)
        except Exception as error:  # of the SDK; there is no common base
            raise SandboxUnavailable(f"{self.name}: {type(error).__name__}: {error}") from error
        await sandbox.prepare(spec)
        return sandbox


def import_sdk(provider: str, module: str) -> Any:
    """The SDK of a provider; `SandboxUnavailable` where its package is not installed."""
    extra = provider.partition(":")[0]
    return import_extra(module, extra, f"sandbox provider {provider}", SandboxUnavailable)
