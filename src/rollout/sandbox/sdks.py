"""Sandboxes of E2B, of Modal, and of any provider of inspect_ai: adapters to their SDKs."""

from __future__ import annotations

import math
import secrets
import shlex
from typing import TYPE_CHECKING, Any

import anyio

from rollout.errors import ConfigError, SandboxLimit, SandboxUnavailable, SandboxUnsupported
from rollout.sandbox.api import MIB
from rollout.sandbox.remote import Output, RemoteProvider, RemoteSandbox, import_sdk

if TYPE_CHECKING:
    from rollout.config.sandbox_section import SandboxSpec
    from rollout.sandbox.api import Command

#: Seconds that output of Modal's may take after its command's end: what goes on in the background
#: may hold its streams open.
_DRAIN_S = 2.0
#: What inspect_ai calls the task that its sandboxes are of.
_TASK = "rollout"


class E2bSandbox(RemoteSandbox):
    """A sandbox of E2B."""

    is_text = True

    def __init__(self, sdk: Any, box: Any) -> None:
        super().__init__(f"e2b-{box.sandbox_id}")
        self._sdk, self._box = sdk, box
        self.lost_errors = (sdk.SandboxNotFoundException, sdk.SandboxNotRunningException)

    async def _call(self, command: Command, output: Output) -> int:
        script = shlex.join(command.argv)
        settings = {} if command.user is None else {"user": command.user}
        if command.input:  # a command in the foreground has no standard input
            path = f"/tmp/.rollout-input-{secrets.token_hex(8)}"
            await self._box.files.write(path, command.input, **settings)
            script = f"{script} <{path}; c=$?; rm -f {path}; exit $c"
        try:
            result = await self._box.commands.run(
                script,
                on_stdout=lambda text: output.add(0, text),
                on_stderr=lambda text: output.add(1, text),
                timeout=0,  # the caller's own
                **settings,
            )
        except self._sdk.CommandExitException as error:
            return int(error.exit_code)
        return int(result.exit_code)

    async def _fetch(self, path: str) -> bytes:
        settings = {} if self.user is None else {"user": self.user}
        return bytes(await self._box.files.read(path, format="bytes", **settings))

    async def expose_port(self, port: int) -> str:
        """See `Sandbox.expose_port`."""
        self.check_open()
        return f"https://{self._box.get_host(port)}"

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`: processes are in it too."""
        self.check_open()
        return str((await self._box.create_snapshot()).snapshot_id)

    async def _close(self) -> None:
        await self._box.kill()


class E2bProvider(RemoteProvider):
    """Asks E2B, which ends a sandbox after `SandboxSpec.lifetime_s`.

    `SandboxSpec.image` is the name of one of its templates.

    Args:
        options: Of every request to E2B, such as `api_key` and `domain`.
    """

    name = "e2b"
    supported = ("image", "workdir", "user", "network")

    def __init__(self, **options: Any) -> None:
        self._sdk, self._settings = import_sdk("e2b", "e2b"), options

    async def _create(self, spec: SandboxSpec) -> E2bSandbox:
        settings = dict(self._settings)
        if not isinstance(spec.network, str):
            settings["network"] = {"allow_out": list(spec.network), "deny_out": ["0.0.0.0/0"]}
        box = await self._sdk.AsyncSandbox.create(
            spec.image,
            timeout=math.ceil(spec.lifetime_s),
            metadata=dict(spec.labels),
            allow_internet_access=spec.network != "none",
            **settings,
        )
        return E2bSandbox(self._sdk, box)


class ModalSandbox(RemoteSandbox):
    """A sandbox of Modal; commands run as root."""

    def __init__(self, sdk: Any, box: Any) -> None:
        super().__init__(f"modal-{box.object_id}")
        self._box = box
        names = ("NotFoundError", "SandboxTerminatedError", "SandboxTimeoutError")
        self.lost_errors = tuple(getattr(sdk.exception, name) for name in names)

    async def _call(self, command: Command, output: Output) -> int:
        if command.user is not None:
            raise SandboxUnsupported(f"{self.id} has one user; user = {command.user!r}")

        async def read(number: int, stream: Any) -> None:
            async for part in stream:
                output.add(number, part)

        process = await self._box.exec.aio(*command.argv, text=False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, 0, process.stdout)
            tasks.start_soon(read, 1, process.stderr)
            for start in range(0, len(command.input), MIB):
                process.stdin.write(command.input[start : start + MIB])
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            code = int(await process.wait.aio())
            tasks.cancel_scope.deadline = anyio.current_time() + _DRAIN_S
        return code

    async def expose_port(self, port: int) -> str:
        """See `Sandbox.expose_port`; ``options["ports"]`` names the ports when it is opened."""
        self.check_open()
        tunnels = await self._box.tunnels.aio()
        if port not in tunnels:
            raise SandboxUnsupported(f"{self.id}: name port {port} in options['ports']")
        return str(tunnels[port].url)

    async def _close(self) -> None:
        await self._box.terminate.aio()


class ModalProvider(RemoteProvider):
    """Asks Modal, which ends a sandbox after `SandboxSpec.lifetime_s`; any image of a registry.

    Args:
        app: The name of the app that they belong to; it is made where there is none.
    """

    name = "modal"
    supported = ("image", "workdir", "network", "cpus", "memory_mb")
    options = ("ports", "gpu", "region", "cloud")

    def __init__(self, *, app: str = "rollout") -> None:
        self._sdk, self._app_name = import_sdk("modal", "modal"), app
        self._app: Any = None

    async def check(self) -> None:
        """See `SandboxProvider.check`."""
        await super().check()
        try:
            self._app = await self._sdk.App.lookup.aio(self._app_name, create_if_missing=True)
        except self._sdk.exception.Error as error:
            raise SandboxUnavailable(f"modal: {error}") from error

    async def _create(self, spec: SandboxSpec) -> ModalSandbox:
        options = dict(spec.options)
        settings: dict[str, Any] = {
            "image": spec.image and self._sdk.Image.from_registry(spec.image),
            "cpu": spec.cpus,
            "memory": spec.memory_mb,
            "tags": dict(spec.labels) or None,
            "encrypted_ports": options.pop("ports", None),
            "outbound_domain_allowlist": None if isinstance(spec.network, str) else spec.network,
            **options,
        }
        box = await self._sdk.Sandbox.create.aio(
            app=self._app,
            timeout=math.ceil(spec.lifetime_s),
            block_network=spec.network == "none",
            **{key: value for key, value in settings.items() if value is not None},
        )
        return ModalSandbox(self._sdk, box)


class InspectSandbox(RemoteSandbox):
    """Environments of one sample of inspect_ai's; the one named "default" is used."""

    is_text = True

    def __init__(self, name: str, provider: InspectProvider, environments: dict[str, Any]) -> None:
        super().__init__(name)
        self._provider, self._environments = provider, environments
        self._environment = environments.get("default") or next(iter(environments.values()))

    async def _call(self, command: Command, output: Output) -> int:
        util = self._provider.util
        data = command.input or None
        try:
            result = await self._environment.exec(
                command.argv, input=data, user=command.user, timeout_retry=False
            )
        except FileNotFoundError:  # no program of that name, where the provider looks itself
            return 127
        except util.SandboxUserUnsupportedError as error:
            raise SandboxUnsupported(f"{self.id}: {error}") from error
        except util.OutputLimitExceededError as error:
            raise SandboxLimit(f"{self.id}: {error}") from error
        output.add(0, result.stdout)
        output.add(1, result.stderr)
        return int(result.returncode)

    async def _fetch(self, path: str) -> bytes:
        return bytes(await self._environment.read_file(path, text=False))

    async def _close(self) -> None:
        kind, config = self._provider.kind, self._provider.config
        await kind.sample_cleanup(_TASK, config, self._environments, False)


class InspectProvider(RemoteProvider):
    """Opens environments of a provider of inspect_ai's, such as ``k8s`` or ``docker``.

    Image, network and resources are those of its configuration.

    Args:
        kind: The provider's name there.
        config: Its configuration, such as the path of a compose file.
    """

    supported = ("workdir", "user")

    def __init__(self, kind: str, *, config: Any = None) -> None:
        self.name, self.config = f"inspect:{kind}", config
        self.util = import_sdk(self.name, "inspect_ai.util")
        registry = import_sdk(self.name, "inspect_ai.util._sandbox.registry")
        try:
            self.kind = registry.registry_find_sandboxenv(kind)
        except ValueError as error:
            raise ConfigError(f"sandbox.provider = {self.name!r}: {error}") from error
        self._count = 0
        self._is_started = False

    async def check(self) -> None:
        """See `SandboxProvider.check`; it does what the provider does before a task's first."""
        await super().check()
        try:
            await self.kind.task_init(_TASK, self.config)
        except Exception as error:
            raise SandboxUnavailable(f"{self.name}: {type(error).__name__}: {error}") from error
        self._is_started = True

    async def _create(self, spec: SandboxSpec) -> InspectSandbox:
        self._count += 1
        name = f"{self.name}-{self._count}"
        environments = await self.kind.sample_init(_TASK, self.config, dict(spec.labels))
        return InspectSandbox(name, self, environments)

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
        if self._is_started:
            await self.kind.task_cleanup(_TASK, self.config, cleanup=True)
