"""The sandboxes of a runtime: bounds how many are open and made at once, and keeps some ready."""

from __future__ import annotations

import logging
import os
from collections import deque
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from rollout.config.sandbox_section import SandboxSpec
from rollout.errors import SandboxError, SandboxUnavailable
from rollout.sandbox.api import Sandbox
from rollout.sandbox.providers import open_provider
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from anyio.abc import TaskGroup

    from rollout.config import SandboxConfig
    from rollout.sandbox.api import SandboxProvider

logger = logging.getLogger("rollout.sandbox")

#: How often one is tried to be opened while its provider is unavailable.
_ATTEMPTS = 4
#: Seconds before the second attempt; doubled before each further one.
_BACKOFF_S = 0.5


@attrs.frozen(kw_only=True)
class PoolStatistics:
    """Counts of a pool.

    Attributes:
        open: In use now.
        warm: Ready for somebody.
        waiting: Callers that wait for one.
        opened, closed: Since the beginning, warm ones included.
        retried: Attempts to open one that the provider had no room for.
        leaked: Not closed in time.
    """

    open: int
    warm: int
    waiting: int
    opened: int
    closed: int
    retried: int
    leaked: int


class SandboxPool:
    """Hands out sandboxes of one provider, each of which is used once.

    Args:
        config: Says who makes sandboxes, what they are, and how many there may be.
        cleanup_s: How long closing one may take.

    Attributes:
        spec: What they are unless a prompt says otherwise.
        tasks: Where they are opened; None while nothing is served.
    """

    def __init__(self, config: SandboxConfig, cleanup_s: float) -> None:
        self._config, self._cleanup_s = config, cleanup_s
        names = [field.name for field in attrs.fields(SandboxSpec)]
        self.spec = SandboxSpec(**{name: getattr(config, name) for name in names})
        self.tasks: TaskGroup | None = None
        #: None until somebody needs one.
        self._provider: SandboxProvider | None = None
        self._creating = anyio.Semaphore(config.max_creating or 4 * (os.cpu_count() or 1))
        self._created: deque[float] = deque(maxlen=config.creations_per_min or 0)
        self._warm: deque[Sandbox] = deque()
        self._wanted = anyio.Event()
        #: By identity, with whether it has a slot.
        self._in_use: dict[int, tuple[Sandbox, bool]] = {}
        self._waiting = self._opened = self._closed = self._retried = self._leaked = 0

    @asynccontextmanager
    async def serving(self, *, is_needed: bool) -> AsyncIterator[None]:
        """Sandboxes may be opened within the block; at its end none is left.

        Args:
            is_needed: Whether it is known that one will be: the provider is looked for at once
                then, as where the configuration names one or keeps some warm.

        Raises:
            SandboxUnavailable: It cannot be used here.
            ConfigError: Its options are wrong.
        """
        async with AsyncExitStack() as stack, open_task_group() as tasks:
            self._stack, self.tasks, self._finding = stack, tasks, anyio.Lock()
            try:
                if is_needed or self._config.warm or self._config.provider != "auto":
                    await self._find_provider()
                yield
            finally:
                self.tasks = None

    def spec_for(self, extra: Mapping[str, Any]) -> SandboxSpec:
        """What the sandbox of a prompt with this `extra` is to be: ``extra["sandbox"]`` differs.

        Raises:
            ConfigError: A key is unknown, or a value wrong.
        """
        values = extra.get("sandbox")
        return self.spec if values is None else self.spec.merge(values)

    def statistics(self) -> PoolStatistics | None:
        """The counts of this moment; None where no sandbox was ever asked for."""
        if self._provider is None:
            return None
        return PoolStatistics(
            open=len(self._in_use),
            warm=len(self._warm),
            waiting=self._waiting,
            opened=self._opened,
            closed=self._closed,
            retried=self._retried,
            leaked=self._leaked,
        )

    async def acquire(self, spec: SandboxSpec | None = None, *, is_beside: bool = False) -> Sandbox:
        """A sandbox, as soon as there is room; give it back with `release`.

        Args:
            spec: What it is to be; the pool's own by default.
            is_beside: Whether the caller has one already: it waits for no room, since those who
                have it might all wait for a second one.

        Raises:
            SandboxUnavailable: The provider had none in all attempts, or the pool is closed.
            SandboxError: It could not be prepared, or the provider cannot do what the spec wants.
            ConfigError: The provider's options are wrong.
        """
        spec, provider = spec or self.spec, await self._find_provider()
        self._waiting += 1
        try:
            sandbox = None
            if not is_beside:
                sandbox = await self._take_warm() if spec == self.spec else None
                if sandbox is None:
                    if self._slots.value == 0 and self._warm:  # in the way of this one
                        await self._close(self._warm.popleft())
                    await self._slots.acquire()
            if sandbox is None:
                sandbox = await self._create(provider, spec, has_slot=not is_beside)
        finally:
            self._waiting -= 1
        self._in_use[id(sandbox)] = sandbox, not is_beside
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """Close a sandbox that `acquire` gave, and make room; a second time does nothing."""
        _, has_slot = self._in_use.pop(id(sandbox), (None, None))
        if has_slot is not None:
            await self._close(sandbox, has_slot=has_slot)

    async def _find_provider(self) -> SandboxProvider:
        """The provider, which is open until the runtime closes."""
        if self.tasks is None:
            raise SandboxUnavailable("there is no runtime that has sandboxes, or it is closed")
        async with self._finding:
            if self._provider is None:
                config = self._config
                opening = open_provider(config.provider, **config.provider_options)
                self._provider = await self._stack.enter_async_context(opening)
                self._slots = anyio.Semaphore(config.max_open or self._provider.max_open)
                self._stack.push_async_callback(self._close_all)
                self.tasks.start_soon(self._keep_warm, self._provider)
        return self._provider

    async def _keep_warm(self, provider: SandboxProvider) -> None:
        """Keep some ready until cancelled, where callers leave room for them."""
        while True:
            self._wanted = anyio.Event()
            while len(self._warm) < self._config.warm and self._slots.value > 0:
                self._slots.acquire_nowait()
                try:
                    sandbox = await self._create(provider, self.spec)
                except Exception:  # whoever asks for one is told why
                    break
                if self._waiting and self._slots.value == 0:
                    await self._close(sandbox)  # somebody waits for its slot
                else:
                    self._warm.append(sandbox)
            await self._wanted.wait()

    async def _take_warm(self) -> Sandbox | None:
        """A warm sandbox that still answers; it brings its slot along."""
        while self._warm:
            sandbox = self._warm.popleft()
            self._wanted.set()
            is_well = False
            try:
                with suppress(SandboxError):
                    is_well = (await sandbox.exec(["true"], timeout_s=10)).exit_code == 0
            finally:
                if not is_well:
                    await self._close(sandbox)
            if is_well:
                return sandbox
        return None

    async def _create(
        self, provider: SandboxProvider, spec: SandboxSpec, *, has_slot: bool = True
    ) -> Sandbox:
        """A new sandbox; where none comes about, its slot is free again."""
        sandbox = None
        try:
            for attempt in range(_ATTEMPTS):
                try:
                    async with self._creating:
                        await self._keep_rate()
                        sandbox = await provider.open(spec)
                    break
                except SandboxUnavailable:
                    if attempt == _ATTEMPTS - 1:
                        raise
                self._retried += 1
                await anyio.sleep(_BACKOFF_S * 2**attempt)
        finally:
            if sandbox is None and has_slot:
                self._slots.release()
        assert sandbox is not None
        self._opened += 1
        return sandbox

    async def _keep_rate(self) -> None:
        """Wait until the oldest of the last `creations_per_min` is a minute ago."""
        while len(self._created) == self._config.creations_per_min:
            wait_s = self._created[0] + 60.0 - anyio.current_time()
            if wait_s <= 0:
                break
            await anyio.sleep(wait_s)
        self._created.append(anyio.current_time())

    async def _close(self, sandbox: Sandbox, *, has_slot: bool = True) -> None:
        is_leaked = True
        try:
            if isinstance(sandbox, Sandbox):  # which shields itself
                sandbox.cleanup_s = min(sandbox.cleanup_s, self._cleanup_s)
            with anyio.move_on_after(self._cleanup_s, shield=True):
                await sandbox.close()
                is_leaked = bool(getattr(sandbox, "is_leaked", False))
        except Exception as error:  # a provider's own, when nobody could do anything about it
            logger.warning("sandbox %s: close failed: %s", sandbox.id, error)
        finally:
            self._closed += 1
            self._leaked += is_leaked
            if has_slot:
                self._slots.release()
            self._wanted.set()

    async def _close_all(self) -> None:
        """Close every sandbox, also those in use, at once."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for sandbox, _ in self._in_use.values():
                    tasks.start_soon(self.release, sandbox)
                while self._warm:
                    tasks.start_soon(self._close, self._warm.popleft())


def wrap_error(error: Exception) -> SandboxError:
    """Why there is no sandbox, which is a provider's own error unless it is one of ours."""
    if isinstance(error, SandboxError):
        return error
    logger.warning("the provider of sandboxes failed", exc_info=error)
    return SandboxUnavailable(f"no sandbox: {type(error).__name__}: {error}")
