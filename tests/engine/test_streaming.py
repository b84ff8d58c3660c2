"""What an engine has sampled reaches its driver in time, whatever gathers it, and is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import anyio
import pytest

import fake_core
import rollout
from fake_core import CountingCore
from pools import generate, make_pool
from rollout import Outcome, Prompt
from rollout.config import (
    ChannelConfig,
    LimitsConfig,
    SchedulingConfig,
    SimulatedEngine,
)
from rollout.engine.core import Chunk, GenerationRequest
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.pool.request_runner import LAST_ANSWER_S, limit_last_answer
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio
INTERVAL_S = 0.25


class HoardingCore(CountingCore):
    """Says what it has when it is asked to end, and takes `answer_s` for that."""

    def __init__(self, *, answer_s: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.answer_s = answer_s

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        ids, log_probs = b"", b""
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                ids, log_probs = ids + chunk.ids, log_probs + chunk.log_probs
        await anyio.sleep(self.answer_s)
        yield Chunk(
            request_id=request.request_id,
            ids=ids,
            log_probs=log_probs,
            finish_reason=chunk.finish_reason,
        )


@pytest.fixture
def hoarding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_core, "HoardingCore", HoardingCore, raising=False)


def pool_of(**options: Any) -> EnginePool:
    return make_pool("fake_core:HoardingCore", options)


async def cut_after(pool: EnginePool, seconds: float) -> Generation:
    """A generation that is cancelled then."""
    generation = Generation()
    with anyio.move_on_after(seconds):
        await generate(pool, [7], 1000, generation)
    return generation


# --- the last answer of a cancelled request


async def test_cancelled_request_keeps_what_its_last_answer_brings(hoarding: None) -> None:
    async with pool_of(token_s=0.1).serving() as pool:
        generation = await cut_after(pool, 5.05)
        assert list(generation.ids) == list(range(8, 58))
        assert generation.finish_reason == "abort"
        (replica,) = pool.statistics()
        assert (replica.tokens.taken, replica.tokens.late) == (50, 0)
        assert (replica.in_flight, replica.zombies) == (0, 0)


async def test_cancelled_request_waits_less_where_clean_up_is_to_be_short() -> None:
    assert limit_last_answer(5.0) == LAST_ANSWER_S
    frozen = Scenario(seed=1).reply("", filler=1000).fault(freeze_at_s=0.5)
    config = frozen.config(
        limits=LimitsConfig(generation_s=2.0, cleanup_s=0.2),
        scheduling=SchedulingConfig(samples_per_prompt=1),
    )
    async with rollout.open_rollout(config) as runtime:
        began = anyio.current_time()
        (trajectory,) = (await runtime.generate([prompt()])).trajectories
        assert anyio.current_time() - began == pytest.approx(2.1)
    assert (trajectory.outcome, trajectory.reason) == (Outcome.DEADLINE, "generation")


# --- tokens on their way


def prompt() -> Prompt:
    return Prompt(messages=[{"role": "user", "content": "go"}])


async def test_simulated_tokens_of_slow_engines_do_not_wait_for_others() -> None:
    config = (
        Scenario(seed=1)
        .reply("", filler=1000)
        .timing(base_s=0.04, slope_s=0.0, prefill_tokens_per_s=None)
        .config(
            engine=SimulatedEngine(stream_interval=64),
            channel=ChannelConfig(stream_interval_s=INTERVAL_S),
            scheduling=SchedulingConfig(samples_per_prompt=12),
        )
    )
    async with rollout.open_rollout(config) as runtime, anyio.create_task_group() as tasks:

        async def look() -> None:
            await anyio.sleep(7.01)
            sampled = 12 * round(7 / 0.04)
            waiting = 12 * round(INTERVAL_S / 0.04 + 1)
            assert runtime.engines.tokens_under_way >= sampled - waiting
            runtime.cancel(reason="enough")

        tasks.start_soon(look)
        batch = await runtime.generate([prompt()])
        tokens = runtime.statistics().replicas[0].tokens
    lengths = {t.transcript.generated_length for t in batch.trajectories}
    assert lengths == {176}, "the step under way was the last one"
    assert (tokens.late, tokens.taken) == (0, 12 * 176)
