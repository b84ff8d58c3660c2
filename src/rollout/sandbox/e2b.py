"""Sandboxes of E2B; `SandboxSpec.image` is the name of one of its templates."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

import anyio

from rollout.errors import SandboxUnavailable
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


class E2bSandbox(RemoteSandbox):
    """A sandbox of E2B."""

    is_text = True

    def __init__(self, sdk: Any, box: Any, **settings: Any) -> None:
        super().__init__(f"e2b-{box.sandbox_id}", **settings)
        self._sdk, self._box = sdk, box
        self.lost_errors = (sdk.SandboxNotFoundException, sdk.SandboxNotRunningException)

    async def _call(self, argv: list[str], data: bytes, user: str | None, output: Output) -> int:
        script = shlex.join(argv)
        settings = {} if user is None else {"user": user}
        if data:  # a command in the foreground has no standard input
            path = f"/tmp/.rollout-input-{self._count}"
            await self._box.files.write(path, data, **settings)
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


class E2bProvider:
    """Asks E2B for sandboxes.

    Args:
        cleanup_s: Seconds that closing one may take.
        options: Of every request to E2B, such as `api_key` and `domain`.
    """

    name = "e2b"
    max_open = 64

    def __init__(self, *, cleanup_s: float = 30.0, **options: Any) -> None:
        self._sdk = import_sdk("e2b", "e2b", "e2b")
        self._cleanup_s, self._options = cleanup_s, options

    async def check(self) -> None:
        """See `SandboxProvider.check`."""
        check_asyncio(self.name)

    async def open(self, spec: SandboxSpec) -> RemoteSandbox:
        """See `SandboxProvider.open`."""
        check_asyncio(self.name)
        spec.refuse_unsupported("sandbox provider e2b", ("image", "workdir", "user", "network"))
        read_options(self.name, spec, ())
        hosts = None if isinstance(spec.network, str) else list(spec.network)
        network = (
            {} if hosts is None else {"network": {"allow_out": hosts, "deny_out": ["0.0.0.0/0"]}}
        )
        try:
            with anyio.CancelScope(shield=True):  # until it has an id that can be killed
                box = await self._sdk.AsyncSandbox.create(
                    spec.image,
                    timeout=math.ceil(spec.lifetime_s),
                    metadata=dict(spec.labels),
                    allow_internet_access=spec.network != "none",
                    **network,
                    **self._options,
                )
        except Exception as error:  # its classes have no common base
            raise SandboxUnavailable(f"e2b: {type(error).__name__}: {error}") from error
        sandbox = E2bSandbox(
            self._sdk,
            box,
            workdir=spec.workdir or "/home/user",
            env=spec.env,
            user=spec.user,
            cleanup_s=self._cleanup_s,
        )
        return await prepare(sandbox, spec)

    async def sweep(self) -> int:
        """See `SandboxProvider.sweep`: E2B ends them after `SandboxSpec.lifetime_s`."""
        return 0

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
