"""Sandboxes of E2B; `SandboxSpec.image` is the name of one of its templates."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

from rollout.sandbox.remote import Output, RemoteProvider, RemoteSandbox, import_sdk

if TYPE_CHECKING:
    from rollout.config.sandbox_section import SandboxSpec
    from rollout.sandbox.api import Command


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
            path = f"/tmp/.rollout-input-{self._count}"
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

    Args:
        options: Of every request to E2B, such as `api_key` and `domain`.
    """

    name = "e2b"
    supported = ("image", "workdir", "user", "network")

    def __init__(self, **options: Any) -> None:
        self._sdk, self._settings = import_sdk("e2b", "e2b", "e2b"), options

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
