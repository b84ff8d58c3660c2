"""Sandboxes of Modal, of any image in a registry."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import anyio

from rollout.errors import SandboxUnavailable, SandboxUnsupported
from rollout.sandbox.api import MIB
from rollout.sandbox.remote import Output, RemoteProvider, RemoteSandbox, import_sdk

if TYPE_CHECKING:
    from rollout.config.sandbox_section import SandboxSpec
    from rollout.sandbox.api import Command

#: Seconds that output may take after its command's end: what goes on in the background may hold
#: its streams open.
_DRAIN_S = 2.0


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
    """Asks Modal, which ends a sandbox after `SandboxSpec.lifetime_s`.

    Args:
        app: The name of the app that they belong to; it is made where there is none.
    """

    name = "modal"
    supported = ("image", "workdir", "network", "cpus", "memory_mb")
    options = ("ports", "gpu", "region", "cloud")

    def __init__(self, *, app: str = "rollout") -> None:
        self._sdk, self._app_name = import_sdk("modal", "modal", "modal"), app
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
