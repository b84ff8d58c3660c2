"""Providers of inspect_ai, used outside of an evaluation: ``inspect:NAME``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.errors import ConfigError, SandboxLimit, SandboxUnavailable, SandboxUnsupported
from rollout.sandbox.remote import Output, RemoteProvider, RemoteSandbox, import_sdk

if TYPE_CHECKING:
    from rollout.config.sandbox_section import SandboxSpec
    from rollout.sandbox.api import Command

_TASK = "rollout"


class InspectSandbox(RemoteSandbox):
    """Environments of one sample of inspect_ai's; the one named "default" is used."""

    is_text = True

    def __init__(self, name: str, provider: InspectProvider, environments: dict[str, Any]) -> None:
        super().__init__(name)
        self._provider, self._environments = provider, environments
        self._environment = environments.get("default") or next(iter(environments.values()))

    async def _call(self, command: Command, output: Output) -> int:
        util = self._provider.util
        try:
            result = await self._environment.exec(
                command.argv,
                input=command.input or None,
                user=command.user,
                timeout_retry=False,
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
        await self._provider.kind.sample_cleanup(
            _TASK, self._provider.config, self._environments, False
        )


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
        self.util = import_sdk(self.name, "inspect_ai.util", "inspect-ai")
        registry = import_sdk(self.name, "inspect_ai.util._sandbox.registry", "inspect-ai")
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
