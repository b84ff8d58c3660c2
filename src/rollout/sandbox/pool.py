"""Bounds how many sandboxes are open and made at once, and keeps some ready."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.config.sandbox_section import SandboxSpec
from rollout.errors import SandboxError, SandboxUnavailable
from rollout.sandbox.api import Sandbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.sandbox.api import SandboxProvider

logger = logging.getLogger("rollout.sandbox")

#: Seconds before the second attempt to open one; doubled before each further, up to a bound.
_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0


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
    """Hands out sandboxes of one provider; each is used once.

    Args:
        provider: Makes them.
        spec: What `warm` ones are, and the default of `acquire`.
        max_open: Open at once, warm ones included; the provider's own bound by default.
        max_creating: Made at once; four for each CPU by default.
        creations_per_min: Made in any minute; None: no bound.
        warm: Kept ready while `keep_warm` runs.
        attempts: To open one where the provider is unavailable, with growing pauses.
        cleanup_s: How long closing one may take; None: as its provider says.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        *,
        spec: SandboxSpec | None = None,
        max_open: int | None = None,
        max_creating: int | None = None,
        creations_per_min: int | None = None,
        warm: int = 0,
        attempts: int = 4,
        cleanup_s: float | None = None,
    ) -> None:
        self.provider = provider
        self.spec = spec or SandboxSpec()
        self._slots = anyio.Semaphore(max_open or provider.max_open)
        self._creating = anyio.Semaphore(max_creating or 4 * (os.cpu_count() or 1))
        self._per_min = creations_per_min
        self._created: deque[float] = deque(maxlen=creations_per_min or 0)
        self._warm_wanted = warm
        self._warm: deque[Sandbox] = deque()
        self._attempts = max(1, attempts)
        self._cleanup_s = math.inf if cleanup_s is None else cleanup_s
        self._wanted = anyio.Event()
        #: By identity; and those of them that have no slot.
        self._in_use: dict[int, Sandbox] = {}
        self._beside: set[int] = set()
        self._waiting = self._opened = self._closed = self._retried = self._leaked = 0
        self._is_closed = False

    @asynccontextmanager
    async def open(self, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
        """A sandbox for the body of an ``async with``; see `acquire`."""
        sandbox = await self.acquire(spec)
        try:
            yield sandbox
        finally:
            await self.release(sandbox)

    async def acquire(self, spec: SandboxSpec | None = None, *, is_beside: bool = False) -> Sandbox:
        """A sandbox, as soon as there is room; give it back with `release`.

        Args:
            spec: What it is to be; the pool's own by default.
            is_beside: Whether the caller has one already: it waits for no room, since those who
                have it might all wait for a second one.

        Raises:
            SandboxUnavailable: The provider had none in all attempts, or the pool is closed.
            SandboxError: It could not be prepared, or the provider cannot do what the spec wants.
        """
        spec = spec or self.spec
        self._waiting += 1
        try:
            sandbox = await self._take_warm() if spec == self.spec else None
            if sandbox is None and is_beside:
                sandbox = await self._create(spec)
                self._beside.add(id(sandbox))
            elif sandbox is None:
                if self._slots.value == 0 and self._warm:  # in the way of this one
                    await self._close_one(self._warm.popleft())
                await self._slots.acquire()
                sandbox = await self._create_in_slot(spec)
        finally:
            self._waiting -= 1
        if self._is_closed:
            await self._close_one(sandbox)
            raise SandboxUnavailable("the pool of sandboxes is closed")
        self._in_use[id(sandbox)] = sandbox
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """Close a sandbox that `acquire` gave, and make room; a second time does nothing."""
        if self._in_use.pop(id(sandbox), None) is not None:
            await self._close_one(sandbox)

    async def keep_warm(self) -> None:
        """Keep `warm` sandboxes ready until cancelled, where callers leave room for them.

        The owner of the pool starts it in a task group of its own.
        """
        while True:
            self._wanted = anyio.Event()
            while len(self._warm) < self._warm_wanted and self._slots.value > 0:
                self._slots.acquire_nowait()
                try:
                    self._warm.append(await self._create_in_slot(self.spec))
                except Exception:  # whoever asks for one is told why
                    break
            await self._wanted.wait()

    async def close(self) -> None:
        """Close every sandbox, also those in use, at once."""
        self._is_closed = True
        left = [*self._in_use.values(), *self._warm]
        self._in_use.clear()
        self._warm.clear()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for sandbox in left:
                    tasks.start_soon(self._close_one, sandbox)

    def statistics(self) -> PoolStatistics:
        """The counts of this moment."""
        return PoolStatistics(
            open=len(self._in_use),
            warm=len(self._warm),
            waiting=self._waiting,
            opened=self._opened,
            closed=self._closed,
            retried=self._retried,
            leaked=self._leaked,
        )

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
                    await self._close_one(sandbox)
            if is_well:
                return sandbox
        return None

    async def _create_in_slot(self, spec: SandboxSpec) -> Sandbox:
        try:
            return await self._create(spec)
        except BaseException:
            self._slots.release()
            raise

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        for attempt in range(self._attempts):
            if attempt:
                self._retried += 1
                await anyio.sleep(min(_BACKOFF_S * 2 ** (attempt - 1), _MAX_BACKOFF_S))
            if self._is_closed:
                break
            try:
                async with self._creating:
                    await self._keep_rate()
                    sandbox = await self.provider.open(spec)
            except SandboxUnavailable:
                if attempt == self._attempts - 1:
                    raise
            else:
                self._opened += 1
                return sandbox
        raise SandboxUnavailable("the pool of sandboxes is closed")

    async def _keep_rate(self) -> None:
        """Wait until the oldest of the last `creations_per_min` is a minute ago."""
        while len(self._created) == self._per_min:
            wait_s = self._created[0] + 60.0 - anyio.current_time()
            if wait_s <= 0:
                break
            await anyio.sleep(wait_s)
        self._created.append(anyio.current_time())

    async def _close_one(self, sandbox: Sandbox) -> None:
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
            if id(sandbox) in self._beside:
                self._beside.remove(id(sandbox))
            else:
                self._slots.release()
            self._wanted.set()
