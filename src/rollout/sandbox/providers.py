"""Finds the provider that a configuration names."""

from __future__ import annotations

import importlib
import inspect
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import anyio

from rollout.errors import ConfigError, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.sandbox.api import SandboxProvider

#: A provider's module is imported when it is named. It is called with the provider's options, and
#: for ``inspect:NAME`` with the name before them.
FACTORIES = {
    "none": "rollout.sandbox.none:NoneProvider",
    "bubblewrap": "rollout.sandbox.bubblewrap:BubblewrapProvider",
    "sandlock": "rollout.sandbox.sandlock:SandlockProvider",
    "docker": "rollout.sandbox.containers:DockerProvider",
    "podman": "rollout.sandbox.containers:PodmanProvider",
    "e2b": "rollout.sandbox.e2b:E2bProvider",
    "modal": "rollout.sandbox.modal:ModalProvider",
    "inspect": "rollout.sandbox.inspect:InspectProvider",
}
#: What "auto" tries, best first.
_WALLS = ("bubblewrap", "sandlock")


@asynccontextmanager
async def open_provider(name: str = "auto", **options: Any) -> AsyncIterator[SandboxProvider]:
    """The provider of this name, which was checked; it is closed at the end.

    Args:
        name: "auto", a key of `FACTORIES`, ``inspect:NAME``, or ``package.module:factory``. "auto"
            takes bubblewrap where it holds, else sandlock where that does; never "none". A factory
            is called with `options` and returns a provider.
        options: The provider's own.

    Raises:
        ConfigError: There is no such provider, or it does not know an option.
        SandboxUnavailable: It cannot be used here; what it lacks.
    """
    faults = []
    for each in _WALLS if name == "auto" else (name,):
        provider = None
        try:
            provider = _make(each, {} if name == "auto" else options)
            await provider.check()
        except BaseException as error:
            await _close(provider)
            if name != "auto" or not isinstance(error, SandboxUnavailable | ConfigError):
                raise
            faults.append(f"{each}: {error}")
            continue
        try:
            yield provider
        finally:
            await _close(provider)
        return
    raise SandboxUnavailable(
        f"no sandbox for what models write ({'; '.join(faults)}). Three ways out: permit user "
        "namespaces (sysctl kernel.unprivileged_userns_clone=1 or "
        "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile "
        "that allows them) and install bubblewrap; name a provider with machines or containers of "
        'its own ("docker", "podman", "e2b", "modal"); or name "none", where commands can do '
        "what the driver can"
    )


async def _close(provider: SandboxProvider | None) -> None:
    if provider is not None:
        with anyio.CancelScope(shield=True):
            await provider.close()


def _make(name: str, options: dict[str, Any]) -> SandboxProvider:
    kind, _, rest = name.partition(":")
    if kind == "inspect" and rest:
        reference, arguments = FACTORIES[kind], [rest]
    elif name in FACTORIES and name != "inspect":
        reference, arguments = FACTORIES[name], []
    elif rest:
        reference, arguments = name, []
    else:
        known = ", ".join(map(repr, ("auto", *FACTORIES)))
        raise ConfigError(
            f"sandbox.provider = {name!r}: expected one of {known}:NAME, or "
            "'package.module:factory'"
        )
    module, _, attribute = reference.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
        inspect.signature(factory).bind(*arguments, **options)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"sandbox.provider = {name!r}: {error}") from error
    return cast("SandboxProvider", factory(*arguments, **options))
