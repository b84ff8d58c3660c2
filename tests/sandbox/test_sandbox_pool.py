"""The pool of sandboxes, over a provider that makes nothing, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from rollout.config import SandboxConfig
from rollout.errors import (
    ConfigError,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
    SandboxUnsupported,
)
from rollout.sandbox import (
    ExecResult,
    PoolStatistics,
    Sandbox,
    SandboxPool,
    SandboxProvider,
    SandboxSpec,
)
from rollout.sandbox.api import Command

pytestmark = pytest.mark.anyio


class FakeSandbox(Sandbox):
    def __init__(self, provider: FakeProvider, number: int) -> None:
        super().__init__(f"fake-{number}", workdir="/", cleanup_s=2.0)
        self.provider = provider
        self.is_ill = self.hangs = False

    async def _run(self, command: Command) -> ExecResult:
        if self.is_ill:
            raise SandboxLost("ill")
        return ExecResult(exit_code=0)

    async def _close(self) -> None:
        await anyio.sleep(3600 if self.hangs else 0.1)
        self.provider.closed.append(self.id)


class FakeProvider(SandboxProvider):
    name, max_open = "fake", 3

    def __init__(self, open_s: float = 1.0) -> None:
        self.open_s = open_s
        self.opening = self.most_opening = 0
        self.opened: list[FakeSandbox] = []
        self.specs: list[SandboxSpec] = []
        self.times: list[float] = []
        self.closed: list[str] = []
        self.faults: list[SandboxError] = []

    async def open(self, spec: SandboxSpec) -> FakeSandbox:
        self.times.append(anyio.current_time())
        if self.faults:
            raise self.faults.pop(0)
        self.opening += 1
        self.most_opening = max(self.most_opening, self.opening)
        try:
            await anyio.sleep(self.open_s)
        finally:
            self.opening -= 1
        sandbox = FakeSandbox(self, len(self.opened))
        self.opened.append(sandbox)
        self.specs.append(spec)
        return sandbox


PROVIDERS: list[FakeProvider] = []


def find_provider() -> FakeProvider:
    return PROVIDERS[-1]


@asynccontextmanager
async def serving(provider: FakeProvider, **settings: Any) -> AsyncIterator[SandboxPool]:
    PROVIDERS[:] = [provider]
    config = SandboxConfig(provider=f"{__name__}:find_provider", **settings)
    pool = SandboxPool(config, cleanup_s=10.0)
    async with pool.serving(is_needed=True):
        yield pool


def counts_of(pool: SandboxPool) -> PoolStatistics:
    counts = pool.statistics()
    assert counts is not None
    return counts


async def use(pool: SandboxPool, seconds: float = 5.0) -> None:
    sandbox = await pool.acquire()
    try:
        await sandbox.exec(["true"])
        await anyio.sleep(seconds)
    finally:
        await pool.release(sandbox)


async def test_pool_bounds_how_many_are_open_and_made_at_once() -> None:
    provider = FakeProvider()
    async with serving(provider, max_creating=2) as pool:
        async with anyio.create_task_group() as tasks:
            for _ in range(7):
                tasks.start_soon(use, pool)
            await anyio.sleep(1.5)
            assert (provider.most_opening, counts_of(pool).open) == (2, 2)
            await anyio.sleep(1)
            assert (counts_of(pool).open, counts_of(pool).waiting) == (3, 4)
        counts = counts_of(pool)
    assert (counts.open, counts.opened, counts.closed, counts.leaked) == (0, 7, 7, 0)
    assert sorted(provider.closed) == sorted(sandbox.id for sandbox in provider.opened)


async def test_pool_makes_no_more_in_a_minute_than_it_may() -> None:
    provider = FakeProvider(open_s=0)
    async with serving(provider, creations_per_min=2) as pool:
        for _ in range(5):
            await use(pool, 0)
    gaps = [
        later - earlier for earlier, later in zip(provider.times, provider.times[2:], strict=False)
    ]
    assert all(gap >= 60 for gap in gaps)
    assert provider.times[-1] - provider.times[0] < 130


async def test_pool_tries_again_where_there_is_no_room_and_not_where_it_is_refused() -> None:
    provider = FakeProvider()
    provider.faults = [SandboxUnavailable("full")] * 2
    async with serving(provider) as pool:
        await use(pool)
        assert provider.times[2] - provider.times[0] == pytest.approx(1.5)  # 0.5 + 1
        provider.faults = [SandboxUnavailable("full")] * 4
        with pytest.raises(SandboxUnavailable, match="full"):
            await pool.acquire()
        provider.faults = [SandboxUnsupported("no")]
        with pytest.raises(SandboxUnsupported):
            await pool.acquire()
        counts = counts_of(pool)
        assert (counts.open, counts.retried, counts.opened, counts.closed) == (0, 5, 1, 1)
        for _ in range(3):  # every failure gave its room back
            await pool.acquire()


async def test_warm_sandboxes_are_ready_healthy_and_used_once() -> None:
    provider = FakeProvider()
    async with serving(provider, warm=2) as pool:
        await anyio.sleep(5)
        assert counts_of(pool).warm == 2
        began = anyio.current_time()
        first = await pool.acquire()
        assert anyio.current_time() == began
        assert first is provider.opened[0]
        await anyio.sleep(5)
        assert counts_of(pool).warm == 2
        provider.opened[1].is_ill = True
        second = await pool.acquire()
        assert second is provider.opened[2]
        await pool.release(first)
        await pool.release(first)
        await anyio.sleep(5)
        assert first is not await pool.acquire()
    counts = counts_of(pool)
    assert (counts.open, counts.warm) == (0, 0)
    assert counts.opened == counts.closed == len(provider.closed)


@pytest.mark.parametrize("spec", [None, SandboxSpec(image="other")])
async def test_warm_sandbox_that_is_being_made_is_in_nobodys_way(spec: SandboxSpec | None) -> None:
    async with serving(FakeProvider(), warm=1, max_open=1) as pool:
        await anyio.sleep(0.5)
        with anyio.fail_after(10):
            sandbox = await pool.acquire(spec)
        await pool.release(sandbox)


async def test_warm_sandbox_makes_room_for_another_spec() -> None:
    provider = FakeProvider()
    async with serving(provider, warm=3) as pool:
        await anyio.sleep(5)
        other = SandboxSpec(env={"A": "1"})
        with anyio.fail_after(10):
            await pool.acquire(other)
        assert provider.specs[-1] is other
        assert counts_of(pool).warm == 2


async def test_closing_the_pool_closes_all_and_counts_what_does_not_end() -> None:
    provider = FakeProvider()
    async with serving(provider) as pool:
        await pool.acquire()
        await pool.acquire()
        provider.opened[0].hangs = True
        began = anyio.current_time()
    assert anyio.current_time() - began == pytest.approx(2.0)
    assert (counts_of(pool).leaked, counts_of(pool).open) == (1, 0)
    with pytest.raises(SandboxUnavailable, match="closed"):
        await pool.acquire()


async def test_cancelled_callers_leave_no_slot_taken() -> None:
    async with serving(FakeProvider()) as pool:
        for delay in (0, 0.5, 1.0, 2.0):
            with anyio.move_on_after(delay):
                await use(pool)
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(use, pool)
            await anyio.sleep(2)
            assert counts_of(pool).open == 3
            with anyio.move_on_after(1):
                await pool.acquire()
        assert counts_of(pool).waiting == 0
        await use(pool)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image", 3),
        ("workdir", "relative"),
        ("env", {"A": 1}),
        ("files", ["f"]),
        ("setup", []),
        ("setup_s", 0),
        ("network", "some"),
        ("cpus", -1),
        ("memory_mb", 1.5),
        ("options", {1: 2}),
        ("user", "\0"),
    ],
)
async def test_wrong_value_of_a_spec_names_field_and_expectation(key: str, value: Any) -> None:
    for make in (SandboxSpec, lambda **settings: SandboxSpec().merge(settings)):
        with pytest.raises(ConfigError, match=rf"sandbox\.{key}.* = .*: expected "):
            make(**{key: value})
