"""Tokens of the real SGLang reach the driver by time, not by number alone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import attrs
import pytest
from driver import ask, prompts, sglang, shares_an_engine

from rollout.engine import DiskWeights, open_engines
from rollout.engine.pool.generation import Generation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.pool.pool import EnginePool

pytestmark = [pytest.mark.anyio, shares_an_engine]

TOKENS, INTERVAL = 1500, 16


@pytest.fixture(scope="module")
async def engines(models: list[str]) -> AsyncIterator[EnginePool]:
    async with open_engines(sglang(models[0], stream_interval=INTERVAL)) as pool:
        yield pool


async def test_tokens_leave_while_their_request_runs(engines: EnginePool) -> None:
    generation, lengths = Generation(), []
    generation.on_tokens = [lambda _: lengths.append(len(generation.ids))]
    await ask(engines, prompts(1)[0], generation, max_new_tokens=TOKENS, ignore_eos=True)
    assert lengths[-1] == TOKENS
    assert len(lengths) >= TOKENS // INTERVAL // 2


async def test_tokens_of_a_change_in_place_have_their_versions_at_the_end(
    engines: EnginePool, models: list[str]
) -> None:
    version = engines.router.replicas[0].weight_version + 1
    generation = Generation()
    async with anyio.create_task_group() as tasks:
        work = partial(ask, max_new_tokens=TOKENS, ignore_eos=True)
        tasks.start_soon(work, engines, prompts(1)[0], generation)
        while len(generation.ids) < 50:
            await anyio.sleep(0.002)
        await engines.update_weights(version, DiskWeights(models[1]), "in_place")
    assert [found for found, _ in generation.versions] == [version - 1, version]
    assert sum(count for _, count in generation.versions) == TOKENS


async def test_cancelled_request_keeps_what_was_sampled(engines: EnginePool) -> None:
    before = attrs.evolve(engines.statistics()[0].tokens)
    generation = Generation()
    async with anyio.create_task_group() as tasks:
        work = partial(ask, max_new_tokens=TOKENS, ignore_eos=True)
        tasks.start_soon(work, engines, prompts(1)[0], generation)
        while len(generation.ids) < 50:
            await anyio.sleep(0.002)
        tasks.cancel_scope.cancel()
    after = engines.statistics()[0].tokens
    assert generation.finish_reason == "abort"
    assert (after.taken - before.taken, after.late) == (len(generation.ids), before.late)
