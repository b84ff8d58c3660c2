"""Sandboxes of Modal, of any image in a registry."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import anyio

from rollout.errors import SandboxUnavailable, SandboxUnsupported
from rollout.sandbox.remote import (
    Output,
    RemoteSandbox,
    check_asyncio,
    import_sdk,
    prepare,
    read_options,
)

if TYPE_CHECKING:
    from rollout.sandbox.spec import SandboxSpec

_CHUNK = 2**20
#: Seconds that output may take after its command's end.
_DRAIN_S = 2.0


class ModalSandbox(RemoteSandbox):
    """A sandbox of Modal; commands run as root."""

    def __init__(self, sdk: Any, box: Any, **settings: Any) -> None:
        super().__init__(f"modal-{box.object_id}", **settings)
        self._box = box
        self.lost_errors = (
            sdk.exception.NotFoundError,
            sdk.exception.SandboxTerminatedError,
            sdk.exception.SandboxTimeoutError,
        )

    async def _call(self, argv: list[str], data: bytes, user: str | None, output: Output) -> int:
        if user is not None:
            raise SandboxUnsupported(f"{self.id} has one user; user = {user!r}")

        async def read(number: int, stream: Any) -> None:
            async for part in stream:
                output.add(number, part)

        process = await self._box.exec.aio(*argv, text=False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, 0, process.stdout)
            tasks.start_soon(read, 1, process.stderr)
            for start in range(0, len(data), _CHUNK):
                process.stdin.write(data[start : start + _CHUNK])
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            code = int(await process.wait.aio())
            # What goes on in the background may hold its streams open.
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


class ModalProvider:
    """Asks Modal for sandboxes.

    Args:
        app: The name of the app that they belong to; it is made where there is none.
        cleanup_s: Seconds that closing one may take.
    """

    name = "modal"
    max_open = 64

    def __init__(self, *, app: str = "rollout", cleanup_s: float = 30.0) -> None:
        self._sdk = import_sdk("modal", "modal", "modal")
        self._app_name, self._cleanup_s = app, cleanup_s
        self._app: Any = None

    async def check(self) -> None:
        """See `SandboxProvider.check`."""
        check_asyncio(self.name)
        await self._find_app()

    async def open(self, spec: SandboxSpec) -> RemoteSandbox:
        """See `SandboxProvider.open`."""
        check_asyncio(self.name)
        supported = ("image", "workdir", "network", "cpus", "memory_mb")
        spec.refuse_unsupported("sandbox provider modal", supported)
        options = read_options(self.name, spec, ("ports", "gpu", "region", "cloud"))
        settings: dict[str, Any] = {
            "image": spec.image and self._sdk.Image.from_registry(spec.image),
            "cpu": spec.cpus,
            "memory": spec.memory_mb,
            "tags": dict(spec.labels) or None,
            "encrypted_ports": options.pop("ports", None),
            "outbound_domain_allowlist": None if isinstance(spec.network, str) else spec.network,
            **options,
        }
        app = await self._find_app()
        try:
            with anyio.CancelScope(shield=True):  # until it has an id that can be terminated
                box = await self._sdk.Sandbox.create.aio(
                    app=app,
                    timeout=math.ceil(spec.lifetime_s),
                    block_network=spec.network == "none",
                    **{key: value for key, value in settings.items() if value is not None},
                )
        except self._sdk.exception.Error as error:
            raise SandboxUnavailable(f"modal: {error}") from error
        sandbox = ModalSandbox(
            self._sdk,
            box,
            workdir=spec.workdir or "/root",
            env=spec.env,
            cleanup_s=self._cleanup_s,
        )
        return await prepare(sandbox, spec)

    async def _find_app(self) -> Any:
        if self._app is None:
            try:
                lookup = self._sdk.App.lookup.aio
                self._app = await lookup(self._app_name, create_if_missing=True)
            except self._sdk.exception.Error as error:
                raise SandboxUnavailable(f"modal: {error}") from error
        return self._app

    async def sweep(self) -> int:
        """See `SandboxProvider.sweep`: Modal ends them after `SandboxSpec.lifetime_s`."""
        return 0

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
