"""Containers of docker or podman, through their command line: any image, any user, also rootful.

A container sleeps for `SandboxSpec.lifetime_s` and runs commands by ``exec``. What drivers that
died have left is found by its labels and removed when the next one opens its provider. The images
need ``sh``, ``sleep``, ``env``, ``cat`` and ``head``.
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
from subprocess import DEVNULL, PIPE
from typing import TYPE_CHECKING

import anyio

from rollout.errors import SandboxError, SandboxLost, SandboxUnavailable, SandboxUnsupported
from rollout.sandbox.api import MIB, Command, SandboxProvider
from rollout.sandbox.local import RELAY_DIRECTORY, Relay
from rollout.sandbox.remote import Output, RemoteSandbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio.abc import ByteReceiveStream, Process

    from rollout.config.sandbox_section import SandboxSpec

_LABEL = "rollout.driver"
#: Seconds that the engine has for anything but pulling an image and running a command.
_CLIENT_S = 60.0
#: What an engine says that does not answer, or has no room; not one that cannot pull an image.
_UNREACHABLE = re.compile(
    "cannot connect|dial unix|unable to connect|"
    "no space left|resource temporarily unavailable|too many open files",
    re.IGNORECASE,
)


class Container(RemoteSandbox):
    """A running container; its name is its id."""

    def __init__(self, provider: ContainerProvider, ports: Sequence[int]) -> None:
        super().__init__(f"rollout-{secrets.token_hex(8)}")
        self._provider, self.ports = provider, ports

    async def _call(self, command: Command, output: Output) -> int:
        words = ["exec", *(["-i"] if command.input else [])]
        if command.user is not None:
            words += ["-u", command.user]
        code = await self._provider.run([*words, self.id, *command.argv], output, command.input)
        if code in (1, 125, 126, 137, 255):  # the client's own failures look like the command's
            self.check_open()
            if command.user and b"unable to find user" in output.result(code).stderr:
                raise SandboxUnsupported(f"{self.id} has no user {command.user!r}")
            running = ""
            with suppress(SandboxError):
                running = await self._provider.call("inspect", "-f", "{{.State.Running}}", self.id)
            if running.strip() != "true":
                raise SandboxLost(f"{self.id} has ended")
        return code

    async def expose_port(self, port: int) -> str:
        """See `Sandbox.expose_port`; ``options["ports"]`` names the ports when it is opened."""
        self.check_open()
        if port not in self.ports:
            raise SandboxUnsupported(f"{self.id}: name port {port} in options['ports']")
        return f"http://{(await self._provider.call('port', self.id, str(port))).split()[0]}"

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


class ContainerProvider(SandboxProvider):
    """Runs containers.

    Args:
        name: "docker" or "podman".
        command: The program, with options of its own before any other; its name by default.
        args: Further arguments of every ``run``.
    """

    def __init__(self, name: str, *, command: Sequence[str] = (), args: Sequence[str] = ()) -> None:
        self.name = name
        self._command, self._args = list(command) or [name], list(args)
        if shutil.which(self._command[0]) is None:
            raise SandboxUnavailable(
                f"there is no program {self._command[0]}: install it, or name another "
                "sandbox.provider"
            )
        self.relay = Relay()

    async def check(self) -> None:
        """See `SandboxProvider.check`; removes containers of drivers here that are gone."""
        listed = await self.call("ps", "--all", "--quiet", "--filter", f"label={_LABEL}")
        form = f'{{{{index .Config.Labels "{_LABEL}"}}}}'
        for identity in listed.split():
            with suppress(SandboxError):  # somebody was faster
                if _is_gone((await self.call("inspect", "-f", form, identity)).strip()):
                    await self.remove(identity)

    async def open(self, spec: SandboxSpec) -> Container:
        """See `SandboxProvider.open`."""
        supported = ("image", "workdir", "user", "network", "cpus", "memory_mb", "max_processes")
        spec.refuse_unsupported(f"sandbox provider {self.name}", supported, ("args", "ports"))
        if spec.image is None:
            raise SandboxUnsupported(
                f"sandbox.image = None: expected the name of an image of {self.name}"
            )
        if not isinstance(spec.network, str):
            raise SandboxUnsupported(f"{self.name} cannot bound the network to {spec.network!r}")
        sandbox = Container(self, spec.options.get("ports", ()))
        words = ["--detach", "--rm", "--init", "--name", sandbox.id, "--entrypoint", "sleep"]
        words += ["--volume", f"{await self.relay.open_directory()}:{RELAY_DIRECTORY}:ro"]
        for key, value in {**spec.labels, _LABEL: _describe_process(os.getpid())}.items():
            words += ["--label", f"{key}={value}"]
        if spec.network == "none":
            words += ["--network", "none"]
        memory = f"{spec.memory_mb}m" if spec.memory_mb else None
        for option, setting in (
            ("--workdir", spec.workdir),
            ("--user", spec.user),
            ("--cpus", spec.cpus),
            ("--memory", memory),
            ("--memory-swap", memory),
            ("--pids-limit", spec.max_processes),
        ):
            if setting is not None:
                words += [option, str(setting)]
        for port in sandbox.ports:
            words += ["--publish", f"127.0.0.1::{port}"]
        words += [*self._args, *map(str, spec.options.get("args", ()))]
        words += [spec.image, str(math.ceil(spec.lifetime_s))]
        try:
            # Killed before the engine has the name, it leaves processes that nobody knows of.
            with anyio.CancelScope(shield=True):
                await self.call("run", *words, timeout_s=max(spec.setup_s, _CLIENT_S))
        except BaseException:
            await sandbox.close()
            raise
        await sandbox.prepare(spec)
        return sandbox

    async def remove(self, name: str) -> None:
        """Kill a container and remove it; nothing where there is none."""
        at_once = ["-t", "0"] if self.name == "podman" else []
        with suppress(SandboxError):
            await self.call("rm", "--force", "--volumes", *at_once, name)

    async def call(self, *words: str, timeout_s: float = _CLIENT_S) -> str:
        """What the engine's program answers; `SandboxUnavailable` where it cannot, `SandboxError`
        where it refuses."""
        output = Output(MIB, "tail")
        try:
            with anyio.fail_after(timeout_s):
                result = output.result(await self.run(words, output))
        except TimeoutError as error:
            reason = f"{self.name} {words[0]} took more than {timeout_s:g} s"
            raise SandboxUnavailable(reason) from error
        except OSError as error:
            raise SandboxUnavailable(f"cannot run {self._command[0]}: {error.strerror}") from error
        if result.exit_code:
            text = (result.stderr or result.stdout).decode(errors="replace").strip()[-1000:]
            kind = SandboxUnavailable if _UNREACHABLE.search(text) else SandboxError
            raise kind(f"{self.name} {words[0]}: {text}")
        return result.stdout.decode(errors="replace")

    async def run(self, words: Sequence[str], output: Output, data: bytes = b"") -> int:
        """Run the engine's program to its end; the exit code. Cancellation kills it."""

        async def read(number: int, stream: ByteReceiveStream | None) -> None:
            assert stream is not None
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                async for part in stream:
                    output.add(number, part)

        with anyio.CancelScope(shield=True):
            stdin = PIPE if data else DEVNULL
            command = [*self._command, *words]
            process = await anyio.open_process(command, stdin=stdin, start_new_session=True)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, 0, process.stdout)
                tasks.start_soon(read, 1, process.stderr)
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
        return code if code >= 0 else 128 - code

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
        await self.relay.close()


async def _feed(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        await process.stdin.send(data)
        await process.stdin.aclose()


def _describe_process(pid: int) -> str:
    """A process of this machine: another text if its number is used again."""
    started = "never"
    with suppress(OSError):
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{socket.gethostname()}-{namespace}/{pid}/{started}"


def _is_gone(driver: str) -> bool:
    machine, _, rest = driver.partition("/")
    pid = rest.partition("/")[0]
    now = _describe_process(int(pid)) if pid.isdigit() else ""
    return now.partition("/")[0] == machine and now != driver
