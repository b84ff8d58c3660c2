"""A core that can lose its engine says so, and the pool starts another."""

from __future__ import annotations

from array import array

import anyio
import pytest
from trio.testing import MockClock

import fake_core
from fake_core import CountingCore
from rollout.engine.channel.core_hosting import LAST_ANSWERS_S, watch_core
from rollout.engine.core import SamplingParams
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.routing import Router

pytestmark = pytest.mark.anyio
LIFE_S = 10.0


@pytest.fixture
def anyio_backend() -> object:
    """Virtual time."""
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


class LosableCore(CountingCore):
    """Loses its engine ten seconds after its start."""

    async def watch(self) -> str:
        """Why, once it has."""
        await anyio.sleep(LIFE_S)
        return "its process ended"


async def test_watch_lost_core_ends_after_its_last_words(caplog: pytest.LogCaptureFixture) -> None:
    lost_at: list[float] = []
    begun = anyio.current_time()
    await watch_core(LosableCore(), lambda: lost_at.append(anyio.current_time() - begun))
    assert lost_at == [LIFE_S + LAST_ANSWERS_S]
    assert caplog.messages == ["the engine is lost: its process ended"]


async def test_watch_core_that_cannot_tell_is_left_alone() -> None:
    await watch_core(CountingCore(), lambda: pytest.fail("lost"))


async def test_pool_core_that_says_it_is_lost_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_core, "LosableCore", LosableCore, raising=False)
    pool = EnginePool(
        placement=InProcess(),
        specs=[CoreSpec("fake_core:LosableCore", {})],
        router=Router(),
        start_timeout_s=5,
    )
    async with pool.serving():
        while pool.statistics()[0].starts < 2:
            await anyio.sleep(0.1)
        generation = Generation()
        await pool.generate(
            generation,
            session_id="s",
            prompt_ids=array("i", [7]).tobytes(),
            sampling=SamplingParams(max_new_tokens=3),
        )
        assert generation.ids.tolist() == [8, 9, 10]
