"""Finds the provider that a configuration names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import anyio

from rollout.errors import ConfigError, SandboxUnavailable

if TYPE_CHECKING:
    from rollout.sandbox.api import SandboxProvider

#: A provider's module is imported when it is named. The factory takes the provider's options, and
#: for `inspect:NAME` the name; it returns an async context manager.
FACTORIES = {
    "none": "rollout.sandbox.none:open_none",
    "bubblewrap": "rollout.sandbox.bubblewrap:open_bubblewrap",
    "sandlock": "rollout.sandbox.sandlock:open_sandlock",
    "docker": "rollout.sandbox.containers:open_docker",
    "podman": "rollout.sandbox.containers:open_podman",
    "e2b": "rollout.sandbox.e2b:open_e2b",
    "modal": "rollout.sandbox.modal:open_modal",
    "inspect": "rollout.sandbox.inspect:open_inspect",
}
#: What "auto" tries, best first.
_WALLS = ("bubblewrap", "sandlock")


@asynccontextmanager
async def open_provider(name: str = "auto", **options: Any) -> AsyncIterator[SandboxProvider]:
    """The provider of this name, closed at the end.

    Args:
        name: "auto", a key of `FACTORIES`, ``inspect:NAME``, or ``package.module:factory``. "auto"
            takes bubblewrap where it holds, else sandlock where that does; never "none". A factory
            is called with `options` and returns a provider, or an async context manager of one.
        options: The provider's own.

    Raises:
        ConfigError: There is no such provider, or it does not know an option.
        SandboxUnavailable: It cannot be used here; what it lacks.
    """
    async with AsyncExitStack() as stack:
        if name != "auto":
            yield await stack.enter_async_context(_open(name, options))
            return
        faults = []
        for wall in _WALLS:
            try:
                provider = await stack.enter_async_context(_open(wall, {}))
            except (SandboxUnavailable, ConfigError) as error:
                faults.append(f"{wall}: {error}")
                continue
            yield provider
            return
        raise SandboxUnavailable(
            f"no sandbox for what models write ({'; '.join(faults)}). Three ways out: permit user "
            "namespaces (sysctl kernel.unprivileged_userns_clone=1 or "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile that "
            "allows them) and install bubblewrap; name a provider with machines or containers of "
            'its own ("docker", "podman", "e2b", "modal"); or name "none", where commands can do '
            "what the driver can"
        )


def _open(name: str, options: dict[str, Any]) -> AbstractAsyncContextManager[SandboxProvider]:
    kind, _, rest = name.partition(":")
    if kind == "inspect" and rest:
        return _call(name, FACTORIES[kind], (rest,), options)
    if name in FACTORIES and kind != "inspect":
        return _call(name, FACTORIES[name], (), options)
    if not rest:
        known = ", ".join(map(repr, ("auto", *FACTORIES)))
        raise ConfigError(
            f"sandbox.provider = {name!r}: expected one of {known}:NAME, or 'package.module:factory'"
        )
    return _call(name, name, (), options)


def _call(
    name: str, reference: str, arguments: tuple[str, ...], options: dict[str, Any]
) -> AbstractAsyncContextManager[SandboxProvider]:
    module, _, attribute = reference.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"sandbox.provider = {name!r}: {error}") from error
    try:
        inspect.signature(factory).bind(*arguments, **options)
    except TypeError as error:
        raise ConfigError(f"sandbox.provider = {name!r}: {error}") from error
    made = factory(*arguments, **options)
    if isinstance(made, AbstractAsyncContextManager):
        return made
    return _closing(cast("SandboxProvider", made))


@asynccontextmanager
async def _closing(provider: SandboxProvider) -> AsyncIterator[SandboxProvider]:
    try:
        yield provider
    finally:
        with anyio.CancelScope(shield=True):
            await provider.close()
