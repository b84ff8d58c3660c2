"""Containers of docker or podman, through their command line: any image, any user, also rootful.

A container sleeps for `SandboxSpec.lifetime_s` and runs commands by ``exec``. What drivers that
died have left is found by its labels and removed when the next one opens its provider. The images
need ``sh``, ``sleep``, ``timeout``, ``cat`` and ``head``.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from rollout.errors import (
    ConfigError,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
    SandboxUnsupported,
)
from rollout.sandbox.api import MIB, Command, ExecResult, Sandbox, cut, timed_out
from rollout.sandbox.local import Relay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio.abc import ByteReceiveStream, Process

    from rollout.sandbox.api import Keep
    from rollout.sandbox.spec import SandboxSpec

DOOR = "/run/rollout"
#: Seconds that the engine has for anything but pulling an image and running a command.
_CLIENT_S = 60.0
_KILL_S = 10.0
#: Seconds after a timeout at which a command ends though nobody killed it, as after a driver's
#: death.
_SPARE_S = 10
#: Marks a command and all that it starts, however it detaches itself.
_MARK = "ROLLOUT_EXEC"
_ENTER = (
    'cd -- "$2" 2>/dev/null || { c=13; [ -e "$2" ] || c=2; [ -f "$2" ] && c=20; '
    'echo "$1 $c" >&2; exit 125; }; shift 2; exec "$@"'
)
_KILL = (
    "for i in 1 2 3 4 5 6 7 8; do found=; for p in /proc/[0-9]*; do "
    'case "$(cat "$p/environ" 2>/dev/null)" in '
    '*"$1"*) kill -9 "${p#/proc/}" 2>/dev/null && found=1;; esac; '
    'done; [ "$found" ] || exit 0; done'
)
_UNREACHABLE = re.compile(
    "cannot connect|connection refused|dial unix|unable to connect|i/o timeout|"
    "no space left|resource temporarily unavailable|too many open files",
    re.IGNORECASE,
)
_CWD_ERRORS: dict[str, type[OSError]] = {
    "2": FileNotFoundError,
    "13": PermissionError,
    "20": NotADirectoryError,
}


class Container(Sandbox):
    """A running container; its name is its id."""

    max_input_bytes = 2**32

    def __init__(self, provider: ContainerProvider, name: str, **settings: Any) -> None:
        super().__init__(name, **settings)
        self._provider = provider
        self._count = 0

    async def _run(self, command: Command) -> ExecResult:
        self._count += 1
        mark = f"{_MARK}={self.id}-{self._count}."
        words = ["exec", *(["-i"] if command.input else []), "-e", mark]
        if command.user is not None:
            words += ["-u", command.user]
        for name, value in command.env.items():
            words += ["-e", f"{name}={value}"]
        words += [self.id, "/bin/sh", "-c", _ENTER, "sh", mark, command.cwd]
        if command.timeout_s is not None:
            words += ["timeout", "-k", "5", str(math.ceil(command.timeout_s) + _SPARE_S)]
        client = _Client(command.max_output_bytes, command.keep)
        try:
            with anyio.move_on_after(command.timeout_s) as scope:
                await client.run([*self._provider.command, *words, *command.argv], command.input)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(_KILL_S, shield=True):
                await self._kill(mark, command.user)
            raise
        result = client.result()
        if scope.cancelled_caught:
            with anyio.move_on_after(_KILL_S, shield=True):
                await self._kill(mark, command.user)
            raise timed_out(command, result)
        if result.exit_code:
            await self._raise_if_lost(result, mark, command.cwd)
        return result

    async def _kill(self, mark: str, user: str | None) -> None:
        as_user = ["-u", user] if user is not None else []
        words = ["exec", *as_user, self.id, "/bin/sh", "-c", _KILL, "sh", mark]
        with suppress(SandboxError):
            await self._provider.call(*words)

    async def _raise_if_lost(self, result: ExecResult, mark: str, cwd: str) -> None:
        """The client's own failures look like the command's; a command may fail in any words."""
        self.check_open()
        if result.exit_code == 125 and result.stderr.startswith(mark.encode()):
            code = result.stderr.split()[-1].decode()
            raise _CWD_ERRORS[code](int(code), os.strerror(int(code)), cwd)
        if result.exit_code in (1, 125, 126, 137, 255) and not await self._is_running():
            raise SandboxLost(f"{self.id} has ended")

    async def _is_running(self) -> bool:
        try:
            said = await self._provider.call("inspect", "-f", "{{.State.Running}}", self.id)
        except SandboxError:
            return False
        return said.strip() == "true"

    async def expose_port(self, port: int) -> str:
        """See `Sandbox.expose_port`; ``options["ports"]`` names the ports when it is opened."""
        self.check_open()
        try:
            said = await self._provider.call("port", self.id, str(port))
        except SandboxError as error:
            raise SandboxUnsupported(
                f"{self.id}: port {port} is not exposed; name it in options['ports']"
            ) from error
        return f"http://{said.split()[0]}"

    async def _host_url(self, url: str) -> str:
        return await self._provider.relay.connect(self, url)

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`; the image stays until somebody removes it."""
        self.check_open()
        name = f"localhost/rollout-snapshot:{secrets.token_hex(8)}"
        await self._provider.call("commit", self.id, name)
        return name

    async def _close(self) -> None:
        await self._provider.remove(self.id)


class _Client:
    """One run of the engine's program, with bounded output that outlasts a cancellation."""

    def __init__(self, cap: int, keep: Keep) -> None:
        self._cap = cap
        self._keep = keep
        self._texts = bytearray(), bytearray()
        self._truncated = False
        self._exit_code = -1

    async def run(self, command: Sequence[str], data: bytes = b"") -> None:
        with anyio.CancelScope(shield=True):
            stdin = {} if data else {"stdin": -3}  # subprocess.DEVNULL
            process = await anyio.open_process(command, start_new_session=True, **stdin)  # type: ignore[arg-type]
        try:
            async with anyio.create_task_group() as tasks:
                for stream, text in zip((process.stdout, process.stderr), self._texts, strict=True):
                    assert stream is not None
                    tasks.start_soon(self._read, stream, text)
                if data:
                    tasks.start_soon(_feed, process, data)
                await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.aclose()
        code = process.returncode
        assert code is not None
        self._exit_code = code if code >= 0 else 128 - code

    async def _read(self, stream: ByteReceiveStream, text: bytearray) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                text += await stream.receive()
                if self._keep == "head" or len(text) > 2 * self._cap + MIB:
                    self._cut(text)

    def _cut(self, text: bytearray) -> None:
        self._truncated |= cut(text, self._cap, self._keep)

    def result(self) -> ExecResult:
        for text in self._texts:
            self._cut(text)
        stdout, stderr = map(bytes, self._texts)
        return ExecResult(
            exit_code=self._exit_code, stdout=stdout, stderr=stderr, truncated=self._truncated
        )


async def _feed(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        for start in range(0, len(data), MIB):
            await process.stdin.send(data[start : start + MIB])
    with suppress(anyio.BrokenResourceError, OSError):
        await process.stdin.aclose()


class ContainerProvider:
    """Runs containers.

    Args:
        command: The program, with options of its own before any other; its name by default.
        args: Further arguments of every ``run``.
        cleanup_s: Seconds that removing a container may take.
    """

    name: str
    max_open = 64

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        args: Sequence[str] = (),
        cleanup_s: float = 30.0,
    ) -> None:
        self.command = list(command) or [self.name]
        if shutil.which(self.command[0]) is None:
            raise SandboxUnavailable(f"there is no program {self.command[0]}")
        self._args = list(args)
        self._cleanup_s = cleanup_s
        self._run = secrets.token_hex(4)
        self._count = 0
        self.relay = Relay(DOOR)

    async def check(self) -> None:
        """See `SandboxProvider.check`; removes what drivers that died have left."""
        await self.sweep()

    async def open(self, spec: SandboxSpec) -> Container:
        """See `SandboxProvider.open`."""
        spec.refuse_unsupported(
            f"sandbox provider {self.name}",
            ("image", "workdir", "user", "network", "cpus", "memory_mb", "max_processes"),
        )
        if spec.image is None:
            raise ConfigError(f"sandbox.image = None: expected the name of an image of {self.name}")
        if not isinstance(spec.network, str):
            raise SandboxUnsupported(f"{self.name} cannot bound the network to {spec.network!r}")
        self._count += 1
        name = f"rollout-{self._run}-{self._count}"
        words = await self._words(spec, name)
        try:
            with anyio.CancelScope(shield=True):  # until the engine has the name
                await self.call("run", *words, timeout_s=spec.setup_s)
            workdir = spec.workdir or await self._workdir(name)
            sandbox = Container(
                self, name, workdir=workdir, env=spec.env, user=spec.user, cleanup_s=self._cleanup_s
            )
            await sandbox.prepare(spec)
        except BaseException:
            with anyio.move_on_after(self._cleanup_s, shield=True):
                await self.remove(name)
            raise
        return sandbox

    async def _words(self, spec: SandboxSpec, name: str) -> list[str]:
        directory = await self.relay.open_directory()
        words = ["--detach", "--rm", "--init", "--name", name, "--entrypoint", "sleep"]
        labels = {**spec.labels, "rollout.driver": _describe_driver()}
        for key, value in labels.items():
            words += ["--label", f"{key}={value}"]
        words += ["--volume", f"{directory}/door:{DOOR}:ro"]
        if spec.network == "none":
            words += ["--network", "none"]
        settings: list[tuple[str, object]] = [
            ("--workdir", spec.workdir),
            ("--cpus", spec.cpus),
            ("--memory", spec.memory_mb and f"{spec.memory_mb}m"),
            ("--memory-swap", spec.memory_mb and f"{spec.memory_mb}m"),
            ("--pids-limit", spec.max_processes),
        ]
        for option, setting in settings:
            if setting is not None:
                words += [option, str(setting)]
        unknown = sorted(set(spec.options) - {"args", "ports"})
        if unknown:
            raise ConfigError(f"sandbox.options: unknown key {unknown[0]!r}; known: args, ports")
        for port in spec.options.get("ports", ()):
            words += ["--publish", f"127.0.0.1::{port}"]
        words += [*self._args, *map(str, spec.options.get("args", ()))]
        assert spec.image is not None
        return [*words, spec.image, str(math.ceil(spec.lifetime_s))]

    async def _workdir(self, name: str) -> str:
        said = await self.call("inspect", "-f", "{{.Config.WorkingDir}}", name)
        return said.strip() or "/"

    async def remove(self, name: str) -> None:
        """Kill a container and remove it; nothing where there is none."""
        at_once = ["-t", "0"] if self.name == "podman" else []
        with suppress(SandboxError):
            await self.call("rm", "--force", "--volumes", *at_once, name, timeout_s=self._cleanup_s)

    async def call(self, *words: str, timeout_s: float = _CLIENT_S) -> str:
        """What the engine's program answers.

        Raises:
            SandboxUnavailable: The engine does not answer, or has no room.
            SandboxError: It refused; with its words.
        """
        client = _Client(MIB, "tail")
        try:
            with anyio.fail_after(timeout_s):
                await client.run([*self.command, *words])
        except TimeoutError as error:
            what = f"{self.name} {words[0]} took more than {timeout_s:g} s"
            raise SandboxUnavailable(what) from error
        except OSError as error:
            raise SandboxUnavailable(f"cannot run {self.command[0]}: {error.strerror}") from error
        result = client.result()
        if result.exit_code:
            said = (result.stderr or result.stdout).decode(errors="replace").strip()[-1000:]
            kind = SandboxUnavailable if _UNREACHABLE.search(said) else SandboxError
            raise kind(f"{self.name} {words[0]}: {said}")
        return result.stdout.decode(errors="replace")

    async def sweep(self) -> int:
        """See `SandboxProvider.sweep`: containers of drivers of this machine that are gone."""
        listed = await self.call("ps", "--all", "--quiet", "--filter", "label=rollout.driver")
        removed = 0
        for identity in listed.split():
            form = '{{index .Config.Labels "rollout.driver"}}'
            try:
                driver = (await self.call("inspect", "-f", form, identity)).strip()
            except SandboxError:
                continue  # somebody was faster
            if _is_gone(driver):
                await self.remove(identity)
                removed += 1
        return removed

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
        await self.relay.close()


def _describe_driver() -> str:
    pid = os.getpid()
    return f"{_machine()}/{pid}/{_start_time(pid)}"


def _machine() -> str:
    return f"{socket.gethostname()}-{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "gone"


def _is_gone(driver: str) -> bool:
    machine, _, rest = driver.partition("/")
    pid, _, started = rest.partition("/")
    return machine == _machine() and pid.isdigit() and _start_time(int(pid)) != started


class DockerProvider(ContainerProvider):
    """Containers of docker."""

    name = "docker"


class PodmanProvider(ContainerProvider):
    """Containers of podman."""

    name = "podman"
