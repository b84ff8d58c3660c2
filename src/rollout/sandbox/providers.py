"""Finds the provider that a configuration names."""

from __future__ import annotations

import importlib
import inspect
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import anyio

from rollout.config.checks import validate
from rollout.config.sandbox_section import Provider
from rollout.errors import ConfigError, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.sandbox.api import SandboxProvider

#: A provider's module is imported when it is named.
_FACTORIES = {
    "none": "rollout.sandbox.local:NoneProvider",
    "bubblewrap": "rollout.sandbox.bubblewrap:BubblewrapProvider",
    "sandlock": "rollout.sandbox.sandlock:SandlockProvider",
    "docker": "rollout.sandbox.containers:ContainerProvider",
    "podman": "rollout.sandbox.containers:ContainerProvider",
    "e2b": "rollout.sandbox.sdks:E2bProvider",
    "modal": "rollout.sandbox.sdks:ModalProvider",
    "inspect": "rollout.sandbox.sdks:InspectProvider",
}


@asynccontextmanager
async def open_provider(name: str = "auto", **options: Any) -> AsyncIterator[SandboxProvider]:
    """The provider of this name, which was checked; it is closed at the end.

    Args:
        name: As in ``sandbox.provider``. "auto" takes bubblewrap where it holds, else sandlock
            where that does; never "none". A factory is called with `options` and returns a
            provider.
        options: The provider's own.

    Raises:
        ConfigError: There is no such provider, or it does not know an option.
        SandboxUnavailable: It cannot be used here; what it lacks.
    """
    provider = await (_open_wall() if name == "auto" else _open(name, options))
    try:
        yield provider
    finally:
        with anyio.CancelScope(shield=True):
            await provider.close()


async def _open_wall() -> SandboxProvider:
    faults = []
    for name in ("bubblewrap", "sandlock"):
        try:
            return await _open(name, {})
        except (SandboxUnavailable, ConfigError) as error:
            faults.append(f"{name}: {error}")
    raise SandboxUnavailable(
        f"no sandbox for what models write ({'; '.join(faults)}). Three ways out: permit user "
        "namespaces (sysctl kernel.unprivileged_userns_clone=1 or "
        "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile "
        "that allows them) and install bubblewrap; name a provider with machines or containers of "
        'its own ("docker", "podman", "e2b", "modal"); or name "none", where commands can do '
        "what the driver can"
    )


async def _open(name: str, options: dict[str, Any]) -> SandboxProvider:
    for fault in validate(Provider, name)[1]:
        raise ConfigError(f"sandbox.provider{fault}")
    kind, _, rest = name.partition(":")
    arguments = {"inspect": [rest], "docker": [kind], "podman": [kind]}.get(kind, [])
    module, _, attribute = _FACTORIES.get(kind, name).partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
        inspect.signature(factory).bind(*arguments, **options)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"sandbox.provider = {name!r}: {error}") from error
    provider = cast("SandboxProvider", factory(*arguments, **options))
    try:
        await provider.check()
    except BaseException:
        with anyio.CancelScope(shield=True):
            await provider.close()
        raise
    return provider
