"""Providers of inspect_ai, used outside of an evaluation: ``inspect:NAME``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from rollout.errors import (
    ConfigError,
    SandboxLimit,
    SandboxUnavailable,
    SandboxUnsupported,
)
from rollout.sandbox.remote import Output, RemoteSandbox, check_asyncio, import_sdk, prepare

if TYPE_CHECKING:
    from rollout.sandbox.spec import SandboxSpec

_TASK = "rollout"


class InspectSandbox(RemoteSandbox):
    """An environment of inspect_ai's; its output is text, files are bytes."""

    is_text = True

    def __init__(
        self, provider: InspectProvider, environments: dict[str, Any], number: int, **settings: Any
    ) -> None:
        super().__init__(f"{provider.name}-{number}", **settings)
        self._provider, self._environments = provider, environments
        self._environment = environments.get("default") or next(iter(environments.values()))

    async def _call(self, argv: list[str], data: bytes, user: str | None, output: Output) -> int:
        try:
            result = await self._environment.exec(
                argv, input=data or None, user=user, timeout_retry=False
            )
        except FileNotFoundError:  # no program of that name, where the provider looks itself
            return 127
        except self._provider.util.SandboxUserUnsupportedError as error:
            raise SandboxUnsupported(f"{self.id}: {error}") from error
        except self._provider.util.OutputLimitExceededError as error:
            raise SandboxLimit(f"{self.id}: {error}") from error
        output.add(0, result.stdout)
        output.add(1, result.stderr)
        return int(result.returncode)

    async def _read(self, path: str, max_bytes: int) -> bytes:
        if (await self.exec(["test", "-f", path])).exit_code:
            return await super()._read(path, 0)  # which says what it is
        data: bytes = await self._environment.read_file(path, text=False)
        if len(data) > max_bytes:
            raise SandboxLimit(f"{path} has more than {max_bytes} bytes")
        return data

    async def _close(self) -> None:
        kind = self._provider.kind
        await kind.sample_cleanup(_TASK, self._provider.config, self._environments, False)


class InspectProvider:
    """Opens environments of a provider of inspect_ai's, such as ``k8s`` or ``docker``.

    Args:
        kind: The provider's name there.
        config: Its configuration, such as the path of a compose file.
        cleanup_s: Seconds that closing one may take.
    """

    max_open = 64

    def __init__(self, kind: str, *, config: Any = None, cleanup_s: float = 60.0) -> None:
        self.name = f"inspect:{kind}"
        self.util = import_sdk(self.name, "inspect_ai.util", "inspect-ai")
        registry = import_sdk(self.name, "inspect_ai.util._sandbox.registry", "inspect-ai")
        try:
            self.kind = registry.registry_find_sandboxenv(kind)
        except ValueError as error:
            raise ConfigError(f"sandbox.provider = {self.name!r}: {error}") from error
        self.config, self._cleanup_s = config, cleanup_s
        self._count = 0
        self._is_started = False

    async def check(self) -> None:
        """See `SandboxProvider.check`; it does what the provider does before a task's first."""
        check_asyncio(self.name)
        try:
            await self.kind.task_init(_TASK, self.config)
        except Exception as error:
            raise SandboxUnavailable(f"{self.name}: {type(error).__name__}: {error}") from error
        self._is_started = True

    async def open(self, spec: SandboxSpec) -> RemoteSandbox:
        """See `SandboxProvider.open`; image, network and resources are those of its `config`."""
        check_asyncio(self.name)
        spec.refuse_unsupported(f"sandbox provider {self.name}", ("workdir", "user"))
        self._count += 1
        try:
            with anyio.CancelScope(shield=True):  # until it can be cleaned up
                environments = await self.kind.sample_init(_TASK, self.config, dict(spec.labels))
        except Exception as error:
            raise SandboxUnavailable(f"{self.name}: {type(error).__name__}: {error}") from error
        workdir = spec.workdir
        if workdir is None:
            first = environments.get("default") or next(iter(environments.values()))
            workdir = (await first.exec(["pwd"], timeout_retry=False)).stdout.strip() or "/"
        sandbox = InspectSandbox(
            self,
            environments,
            self._count,
            workdir=workdir,
            env=spec.env,
            user=spec.user,
            cleanup_s=self._cleanup_s,
        )
        return await prepare(sandbox, spec)

    async def sweep(self) -> int:
        """See `SandboxProvider.sweep`: what is left is its provider's business."""
        return 0

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
        if self._is_started:
            await self.kind.task_cleanup(_TASK, self.config, cleanup=True)
