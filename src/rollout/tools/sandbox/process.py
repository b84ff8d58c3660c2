"""One sandbox, as the driver sees it: a supervisor's process that answers calls."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from rollout.errors import ToolError
from rollout.tools.sandbox.sandbox_limits import SandboxLimits

if TYPE_CHECKING:
    from anyio.abc import Process


Method = Literal["namespaces", "bubblewrap", "landlock", "none"]
Language = Literal["python", "shell"]

#: From closing a supervisor's standard input to killing it; it needs a tenth of a second.
STOP_S = 3.0
#: JSON writes a byte as six at worst, and takes a little for itself.
_LARGEST_GROWTH = 6
_FRAME_ROOM = 65536
_LENGTH = struct.Struct("=I")
_INSIDE = Path(__file__).with_name("inside")
_BOOTSTRAP = (
    "import sys, types; p = types.ModuleType('rollout_sandbox'); p.__path__ = [sys.argv[1]]; "
    "sys.modules[p.__name__] = p; from rollout_sandbox.supervisor import main; main()"
)
#: What a supervisor gets of the driver's environment: nothing that might be a secret.
_HANDED_ON = ("PATH", "LD_LIBRARY_PATH")


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a sandbox is made.

    Attributes:
        method: What isolates it.
        limits: What it may use.
        python: The interpreter, of Python 3.9 or newer; its packages can be imported inside.
        readable: Paths that programs inside may read, beside the system and the interpreter.
        bubblewrap: The program ``bwrap``, for that method.
        door: Host and port that programs inside reach, as 127.0.0.1 and that port; None for none.
            Not with "landlock", where programs have no sockets.
        bounds_address_space: Whether `limits.memory_mb` bounds the address space of a process too:
            some runtimes reserve much more than they use.
    """

    method: Method
    limits: SandboxLimits
    python: str = sys.executable
    readable: tuple[str, ...] = ()
    bubblewrap: str = ""
    door: tuple[str, int] | None = None
    bounds_address_space: bool = True


class SandboxProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A command to be run, with its files.

    Attributes:
        command: The program and its arguments.
        environment: Variables beside those that each program inside has.
        files: What is written before it starts, by relative paths.
        collect: Which files are read after it has ended: relative paths of files or directories, or
            patterns of paths, in which ``*`` stands for any text.
        collected_bytes: Most bytes of these.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = {}
    files: Mapping[str, bytes] = {}
    collect: tuple[str, ...] = ()
    collected_bytes: int = 0


class SandboxAnswer(msgspec.Struct, frozen=True):
    """How a call went.

    Attributes:
        status: "ok", "error" (the code failed), or "stopped": a bound was passed or the process
            ended, and the sandbox is of no use any more.
        reason: The bound, the exit code or what went wrong.
        output: What was printed, at most ``limits.max_output_bytes``; of a program the end of it.
        code: Exit code of a program that has ended; negative: the signal that killed it.
        files: What was collected after a program, by relative paths.
        left_out: Paths that were to be collected, and were too long or no plain files; after a
            program also the patterns that nothing matched.
    """

    status: Literal["ready", "ok", "error", "stopped"]
    reason: str = ""
    output: str = ""
    code: int | None = None
    files: dict[str, bytes] = {}
    left_out: list[str] = []


#: Bytes of the files that are collected after a call, together.
COLLECTED_BYTES = 16 * 1024 * 1024


class SandboxProcess:
    """A running sandbox; its starter closes it.

    The death of the driver, whatever causes it, ends it too.
    """

    def __init__(self, process: Process, limits: SandboxLimits) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._answers = BufferedByteReceiveStream(process.stdout)
        self._largest_answer = limits.max_output_bytes * _LARGEST_GROWTH + _FRAME_ROOM

    @classmethod
    async def start(cls, spec: SandboxSpec) -> SandboxProcess:
        """A sandbox that is ready for calls; on cancellation nothing is left.

        Raises:
            ToolError: It cannot be isolated as asked, or the interpreter does not run.
        """
        command = [spec.python, "-I", "-c", _BOOTSTRAP, str(_INSIDE)]
        environment = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
        try:
            process = await anyio.open_process(
                command, stderr=subprocess.DEVNULL, start_new_session=True, env=environment, cwd="/"
            )
        except OSError as error:
            raise ToolError(f"cannot run {spec.python!r}: {error.strerror}") from error
        sandbox = cls(process, spec.limits)
        try:
            answer = await sandbox._exchange(_settings_of(spec))
            if answer.status != "ready":
                raise ToolError(answer.reason)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def call(
        self, language: Language, code: str, *, is_fresh: bool, collect: Sequence[str] = ()
    ) -> SandboxAnswer:
        """Run one piece of code; one call at a time.

        After a cancellation the sandbox is of no use, for the call runs on until `close`.

        Args:
            language: What `code` is written in.
            code: The program.
            is_fresh: Python runs in a new process and an empty directory, not in the one that
                keeps its variables. A shell is always a new process; its files stay.
            collect: Which files are read after it, if it has written them: as of a program.
        """
        most = COLLECTED_BYTES if collect else 0
        message = {"language": language, "code": code, "is_fresh": is_fresh}
        files = {"collect": list(collect), "collected_bytes": most}
        return await self._exchange(message | files, 2 * most)

    async def run_program(self, program: SandboxProgram) -> SandboxAnswer:
        """Run a command to its end; the only call of its sandbox."""
        message = {"language": "program", **msgspec.structs.asdict(program)}
        return await self._exchange(message, 2 * program.collected_bytes)

    async def _exchange(
        self, message: Mapping[str, object], further_bytes: int = 0
    ) -> SandboxAnswer:
        body = msgspec.json.encode(message)
        try:
            await self._requests.send(_LENGTH.pack(len(body)) + body)
            (length,) = _LENGTH.unpack(await self._answers.receive_exactly(_LENGTH.size))
            if length <= self._largest_answer + further_bytes:
                frame = await self._answers.receive_exactly(length)
                return msgspec.json.decode(frame, type=SandboxAnswer)
        except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return SandboxAnswer("stopped", "the sandbox ended")
        except msgspec.DecodeError:
            pass
        return SandboxAnswer("stopped", "the sandbox gave no proper answer")

    async def close(self) -> None:
        """End every process of the sandbox and remove its files; shielded, and bounded."""
        with anyio.CancelScope(shield=True):
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                await self._requests.aclose()
            with anyio.move_on_after(STOP_S):
                await self._process.wait()
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            await self._process.aclose()


def _settings_of(spec: SandboxSpec) -> dict[str, object]:
    return {
        "method": spec.method,
        "readable": [str(Path(path).resolve()) for path in spec.readable],
        "directory": tempfile.gettempdir(),
        "bubblewrap": spec.bubblewrap,
        "door": list(spec.door or ()),
        "bounds_address_space": spec.bounds_address_space,
        **spec.limits.for_supervisor(),
    }
