"""Engines that open before all of their replicas serve; virtual time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

import rollout
from faulty_cores import UpdatableCore
from pools import generate, make_pool
from rollout.config import SimulatedEngine
from rollout.engine.pool.pool import EnginePool
from rollout.engine.weight_broadcasting import describe_tensors
from rollout.engine.weights import DiskWeights
from rollout.errors import ConfigError, EngineError
from rollout.testing import Scenario

pytestmark = [pytest.mark.anyio, pytest.mark.rollout(ceiling_s=10_000)]


class SlowStart(UpdatableCore):
    """Takes its time to start; fails until `fails_until` on the clock."""

    def __init__(self, *, start_s: float = 0.0, fails_until: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self._start_s, self._fails_until = start_s, fails_until

    async def start(self) -> None:
        await anyio.sleep(self._start_s)
        if anyio.current_time() < self._fails_until:
            raise MemoryError("no room on the card")


def pool_of(*options: dict[str, Any], **pool: Any) -> EnginePool:
    cores = [{"token_s": 1.0, **each} for each in options]
    return make_pool("test_min_replicas:SlowStart", *cores, start_timeout_s=1000, **pool)


async def test_pool_opens_once_enough_serve_and_the_rest_join_with_the_current_weights() -> None:
    pool = pool_of({}, {"start_s": 10.0}, {"start_s": 100.0}, min_replicas=2)
    async with pool.serving():
        assert anyio.current_time() == pytest.approx(10.0)
        assert [each.state for each in pool.statistics()] == ["serving", "serving", "starting"]
        weights = describe_tensors(
            {"a": torch.zeros(1)}, host="h", port=1, replicas=pool.statistics()
        )
        assert weights.world_size == 3
        await pool.update_weights(5, DiskWeights("w5"))
        await anyio.sleep(100)
        assert [each.state for each in pool.statistics()] == ["serving"] * 3
        pool.drain("engine-0")
        pool.drain("engine-1")
        generation = await generate(pool, [5, 100], 2)
        assert (generation.replica, generation.versions) == ("engine-2", [[5, 2]])


async def test_pool_without_a_least_number_waits_for_all() -> None:
    async with pool_of({}, {"start_s": 100.0}).serving():
        assert anyio.current_time() == pytest.approx(100.0)


async def test_pool_opens_without_one_that_fails_which_is_tried_again_for_as_long_as_it_takes() -> (
    None
):
    pool = pool_of({}, {"fails_until": 1000.0}, min_replicas=1)
    async with pool.serving():
        await anyio.sleep(900)
        missing = pool.statistics()[1]
        assert missing.state in ("starting", "restarting")
        assert missing.last_error == "engine-1: MemoryError: no room on the card"
        await anyio.sleep(140)
        assert pool.statistics()[1].state == "serving"


async def test_pool_of_which_too_many_fail_does_not_open() -> None:
    pool = pool_of(
        {"start_s": 500.0}, {"fails_until": 9e9}, {"fails_until": 9e9}, {}, min_replicas=3
    )
    with pytest.raises(EngineError, match=r"^engine-[12]: MemoryError: no room on the card$"):
        async with pool.serving():
            pytest.fail("opened")
    assert anyio.current_time() == 0.0


def test_config_of_more_than_there_are_is_refused() -> None:
    engine = {"kind": "simulated", "replicas": 2, "min_replicas": 3}
    with pytest.raises(ConfigError, match=r"min_replicas.*expected at most engine\.replicas = 2"):
        rollout.config_from_dict({"engine": engine})


async def test_explanation_and_statistics_name_the_missing_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rollout.engine.cores.simulated.simulated_core import SimulatedCore

    real, started = SimulatedCore.start, []

    async def start(self: Any) -> None:
        started.append(self)
        if len(started) > 1:
            await anyio.sleep(50)
        await real(self)

    monkeypatch.setattr(SimulatedCore, "start", start)
    scenario = Scenario(seed=1).reply("", filler=5)
    config = scenario.config(engine=SimulatedEngine(replicas=3, min_replicas=1))
    async with rollout.open_rollout(config) as runtime:
        missing = runtime.statistics().missing
        assert len(missing) == 2
        text = str(runtime.explain())
        assert f"engines without {', '.join(missing)}" in text
        assert all(f"{name}: starting" in text for name in missing)
        await anyio.sleep(60)
        assert runtime.statistics().missing == ()
        assert "engines\n" in str(runtime.explain())
