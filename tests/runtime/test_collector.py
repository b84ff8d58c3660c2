"""While a runtime is open, Python collects garbage seldom and leaves alone what was loaded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from itertools import product
from typing import Any

import anyio
import msgspec
import pytest

import rollout
from rollout.config import SchedulingConfig
from rollout.runtime.collector import SELDOM
from rollout.testing import Scenario, tool_call
from slow_cases import slow_but

pytestmark = pytest.mark.anyio
#: No test waits for its engine in real time.
QUICK: dict[str, Any] = {"base_s": 0.0, "slope_s": 0.0, "prefill_tokens_per_s": None}
SILENT = Scenario(seed=1).reply("", "ok").timing(**QUICK)
PYTHONS = (700, 10, 10)
PROMPT = rollout.Prompt(messages=[{"role": "user", "content": "hello"}])


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed(collector_of_users: None) -> Iterator[None]:
    assert settings() == (False, PYTHONS)
    yield
    gc.enable()
    gc.unfreeze()


def settings() -> tuple[bool, tuple[int, int, int]]:
    return gc.get_freeze_count() > 0, gc.get_threshold()


async def test_runtime_open_is_frozen_and_collects_seldom_and_gives_both_back() -> None:
    async with rollout.open_rollout(SILENT.config()) as runtime:
        assert settings() == (True, SELDOM)
        await runtime.generate([PROMPT])
        assert settings() == (True, SELDOM)
    assert settings() == (False, PYTHONS)


async def test_runtime_open_finds_new_cycles_and_leaves_old_ones_until_it_closes() -> None:
    old = Knot()
    old_gone = weakref.ref(old)
    async with rollout.open_rollout(SILENT.config()):
        young = Knot()
        young_gone = weakref.ref(young)
        del old, young
        gc.collect()
        assert young_gone() is None
        assert old_gone() is not None
    gc.collect()
    assert old_gone() is None


async def test_runtime_that_fails_to_open_or_whose_block_raises_gives_both_back() -> None:
    with pytest.raises(rollout.EngineError):
        async with rollout.open_rollout(SILENT.config(model=rollout.ModelConfig(path="/nowhere"))):
            pytest.fail("it opened")
    assert settings() == (False, PYTHONS)
    with pytest.raises(ZeroDivisionError):
        async with rollout.open_rollout(SILENT.config()):
            raise ZeroDivisionError
    assert settings() == (False, PYTHONS)


async def test_runtimes_at_once_give_both_back_with_the_last() -> None:
    async with rollout.open_rollout(SILENT.config()):
        async with rollout.open_rollout(SILENT.config()):
            pass
        assert settings() == (True, SELDOM)
    assert settings() == (False, PYTHONS)


async def test_runtime_told_not_to_freeze_leaves_the_collector_alone() -> None:
    config = SILENT.config(scheduling=SchedulingConfig(freeze_heap=False))
    async with rollout.open_rollout(config):
        assert settings() == (False, PYTHONS)


async def test_runtime_leaves_a_callers_thresholds_alone() -> None:
    gc.set_threshold(5000, 20, 30)
    async with rollout.open_rollout(SILENT.config()):
        assert gc.get_threshold() == (5000, 20, 30)
    assert gc.get_threshold() == (5000, 20, 30)
    gc.set_threshold(*PYTHONS)
    async with rollout.open_rollout(SILENT.config()):
        gc.set_threshold(900, 9, 9)
    assert gc.get_threshold() == (900, 9, 9)


async def test_runtime_leaves_a_disabled_collector_and_a_frozen_heap_alone() -> None:
    gc.disable()
    async with rollout.open_rollout(SILENT.config()):
        assert settings() == (False, PYTHONS)
        assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    async with rollout.open_rollout(SILENT.config()):
        pass
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize(
    ("anyio_backend", "method"),
    slow_but(
        product(["trio", "asyncio"], ["generate", "stream", "collect"]),
        ("trio", "generate"),
        ("asyncio", "stream"),
        ("asyncio", "collect"),
    ),
)
async def test_calls_leave_nothing_to_the_collector(method: str) -> None:
    prompts = [msgspec.structs.replace(PROMPT, uid=f"p{at}") for at in range(24)]

    async def call() -> None:
        if method == "generate":
            await runtime.generate(prompts)
        elif method == "collect":
            await runtime.collect(iter(prompts), 24)
        else:
            async with runtime.stream(prompts) as trajectories:
                async for _ in trajectories:
                    pass

    async with rollout.open_rollout(SILENT.config()) as runtime:
        assert await count_garbage(call) < len(prompts)
        assert runtime.statistics().finished == 2 * len(prompts)


async def count_garbage(call: Callable[[], Awaitable[None]]) -> int:
    """How many objects a second call leaves that only a collection finds."""
    for _ in range(2):  # what is made once, is made in the first
        gc.collect()
        gc.disable()
        await call()
        await anyio.wait_all_tasks_blocked()
    return gc.collect()


@rollout.function_tool
async def fails(how: str) -> str:
    """Never return.

    Args:
        how: How it fails.
    """
    await anyio.sleep_forever()
    return ""


@pytest.mark.parametrize(
    ("anyio_backend", "how"),
    slow_but(
        product(["trio", "asyncio"], ["times out", "is cancelled"]),
        ("trio", "is cancelled"),
        ("asyncio", "times out"),
    ),
)
async def test_calls_that_fail_leave_nothing_to_the_collector(how: str) -> None:
    calling = Scenario(seed=1).reply("hello", tool_call("fails", how=how)).then("ok")
    calling = calling.timing(**QUICK)
    limits = rollout.LimitsConfig(tool_s=0.1 if how == "times out" else 60.0)

    async def call() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.generate, [PROMPT] * 20)
            if how == "is cancelled":
                await anyio.wait_all_tasks_blocked()
                runtime.cancel(reason="enough")

    async with rollout.open_rollout(calling.config(limits=limits), [fails]) as runtime:
        assert await count_garbage(call) < 20
        assert runtime.statistics().finished == 40
