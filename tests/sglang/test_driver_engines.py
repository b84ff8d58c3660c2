"""SGLang in its own environment, behind the channel, as users run it."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest
from driver import (
    EMBEDDED,
    ask,
    ask_all,
    check_pair,
    command,
    is_alive,
    processes,
    prompts,
    schedulers,
    sglang,
    shares_an_engine,
)

from rollout.config import (
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SGLangEngine,
    TransformersEngine,
)
from rollout.engine import open_engines
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.errors import EngineError

pytestmark = [pytest.mark.anyio, shares_an_engine]


async def test_engines_model_that_sglang_cannot_load_is_an_error(tmp_path: Path) -> None:
    before = processes()
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(EngineError, match=r"^engine-0: SGLang did not start: "):
        async with open_engines(sglang(str(tmp_path))):
            pytest.fail("opened")
    assert set(processes()) <= set(before)


async def test_engines_interpreter_without_sglang_is_an_error(models: list[str]) -> None:
    config = RolloutConfig(
        model=ModelConfig(path=models[0]),
        engine=SGLangEngine(device="cpu"),
        placement=LocalProcessPlacement(python=sys.executable),
    )
    with pytest.raises(EngineError, match="SGLang cannot be imported by "):
        async with open_engines(config):
            pytest.fail("opened")


async def test_engines_sglang_serves_as_every_engine_does(pool: EnginePool) -> None:
    await check_pair(pool)


async def test_engines_sglang_and_transformers_agree_on_greedy_ids(
    pool: EnginePool, models: list[str]
) -> None:
    await agree(pool, models[0], prompts(16))


@pytest.mark.slow
async def test_engines_sglang_and_transformers_agree_on_the_embedded_model() -> None:
    texts = np.random.default_rng(5).integers(1000, 40000, (8, 48)).tolist()
    known = set(processes())
    async with open_engines(sglang(EMBEDDED)) as pool:
        await agree(pool, EMBEDDED, texts)
    assert set(processes()) <= known


async def agree(pool: EnginePool, model: str, texts: list[list[int]]) -> None:
    config = RolloutConfig(
        model=ModelConfig(path=model), engine=TransformersEngine(dtype="float32")
    )
    async with open_engines(config) as other:
        expected = await ask_all(other, texts)
    for real, own in zip(await ask_all(pool, texts), expected, strict=True):
        assert real.ids == own.ids
        assert real.finish_reason == own.finish_reason
        np.testing.assert_allclose(real.log_probs, own.log_probs, atol=1e-4)


async def test_engines_thousand_cancelled_generations_leave_sglang_idle(pool: EnginePool) -> None:
    await cancel_thousand(pool)


@pytest.mark.slow
async def test_engines_thousand_cancelled_are_gone_in_a_second_and_two_steps(
    pool: EnginePool,
) -> None:
    """The measure is the scheduler's own: its decode steps are timed before."""
    begun = anyio.current_time()
    await ask_all(pool, prompts(128), max_new_tokens=20, ignore_eos=True)
    step_s = (anyio.current_time() - begun) / 20
    assert await cancel_thousand(pool) < 1 + 2 * step_s


async def cancel_thousand(pool: EnginePool) -> float:
    """Seconds from the cancellation until nothing is running, queued or cached for a request."""
    generations = [Generation() for _ in range(1000)]
    async with anyio.create_task_group() as tasks:
        for text, generation in zip(prompts(1000), generations, strict=True):
            tasks.start_soon(
                partial(ask, pool, text, generation, max_new_tokens=400, ignore_eos=True)
            )
        while sum(bool(generation.ids) for generation in generations) < 64:
            await anyio.sleep(0.01)
        assert pool.statistics()[0].in_flight == 1000
        tasks.cancel_scope.cancel()
    cancelled_at = anyio.current_time()
    while (
        pool.statistics()[0].in_flight
        or (load := pool.loads()["engine-0"]).running
        or load.queued
        or load.kv_used
    ):
        await anyio.sleep(0.005)
    took_s = anyio.current_time() - cancelled_at
    assert pool.statistics()[0].zombies == 0
    assert (await ask(pool, [5, 6], Generation())).finish_reason in ("stop", "length")
    return took_s


async def test_engines_scheduler_killed_is_replaced_and_its_requests_go_on(
    pool: EnginePool,
) -> None:
    starts = pool.statistics()[0].starts
    generation = Generation()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            partial(ask, pool, [5, 6, 7], generation, max_new_tokens=900, ignore_eos=True)
        )
        while not generation.ids:
            await anyio.sleep(0.002)
        (victim,) = schedulers()
        os.kill(victim.pid, signal.SIGSTOP)  # it cannot finish before it is killed
        os.kill(victim.pid, signal.SIGKILL)
    assert (len(generation.ids), generation.finish_reason) == (900, "length")
    assert generation.resumes == 1
    assert pool.statistics()[0].starts == starts + 1
    assert victim not in schedulers()


async def test_engines_termination_drains_what_is_under_way(pool: EnginePool) -> None:
    generation = Generation()
    starts = pool.statistics()[0].starts
    (engine,) = [p for p in processes() if "rollout.engine.channel.child" in command(p)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            partial(ask, pool, [5, 6], generation, max_new_tokens=900, ignore_eos=True)
        )
        while not generation.ids:
            await anyio.sleep(0.002)
        engine.terminate()
    assert (len(generation.ids), generation.finish_reason) == (900, "length")
    assert generation.resumes == 0
    while is_alive(engine):
        await anyio.sleep(0.05)
    while pool.statistics()[0].starts == starts:  # the next test must not see it start
        await anyio.sleep(0.05)
