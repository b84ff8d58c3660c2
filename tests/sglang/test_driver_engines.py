"""SGLang in its own environment, behind the channel, as users run it."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import psutil
import pytest
from models import VOCABULARY, save_model

from rollout.config import (
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SGLangEngine,
    TransformersEngine,
)
from rollout.engine import SamplingParams, open_engines
from rollout.engine.core import pack_ids
from rollout.engine.generation import Generation
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.engine.pool import EnginePool

pytestmark = pytest.mark.anyio

#: Made by `make sglang-cpu`; the variable names another one.
PYTHON = os.environ.get(
    "ROLLOUT_SGLANG_PYTHON", str(Path(__file__).parents[2] / ".venv-sglang/bin/python")
)
EMBEDDED = "embedded:smollm2-135m-instruct"


@pytest.fixture(params=["trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The driver's loop, in real time; the engine's own is asyncio's."""
    return str(request.param)


def sglang(model: str, **engine: Any) -> RolloutConfig:
    options = {"device": "cpu", "dtype": "float32", "max_running": 128, **engine}
    return RolloutConfig(
        model=ModelConfig(path=model),
        engine=SGLangEngine(**options),
        placement=LocalProcessPlacement(python=PYTHON),
    )


def processes() -> list[psutil.Process]:
    """Of ours that run an engine, SGLang's own included."""
    return psutil.Process().children(recursive=True)


def scheduler() -> psutil.Process:
    return next(p for p in processes() if "sglang::scheduler" in " ".join(p.cmdline()))


async def ask(
    pool: EnginePool, prompt: Sequence[int], generation: Generation, **sampling: Any
) -> Generation:
    await pool.generate(
        generation,
        session_id=str(id(generation)),
        prompt_ids=pack_ids(list(prompt)),
        sampling=SamplingParams(**{"max_new_tokens": 32, "temperature": 0.0, **sampling}),
    )
    return generation


def prompts(count: int, length: int = 24) -> list[list[int]]:
    return np.random.default_rng(3).integers(3, VOCABULARY, (count, length)).tolist()


async def answers(config: RolloutConfig, texts: list[list[int]]) -> list[Generation]:
    generations = [Generation() for _ in texts]
    async with open_engines(config) as pool, anyio.create_task_group() as tasks:
        for text, generation in zip(texts, generations, strict=True):
            tasks.start_soon(ask, pool, text, generation)
    return generations


@pytest.mark.parametrize("family", ["llama", "qwen2"])
async def test_engines_sglang_and_transformers_agree_on_greedy_ids(
    family: str, tmp_path: Path
) -> None:
    model = save_model(family, tmp_path)
    await agree(model, prompts(16))


async def test_engines_sglang_and_transformers_agree_on_the_embedded_model() -> None:
    rng = np.random.default_rng(5)
    await agree(EMBEDDED, rng.integers(1000, 40000, (8, 48)).tolist())


async def agree(model: str, texts: list[list[int]]) -> None:
    ours = RolloutConfig(model=ModelConfig(path=model), engine=TransformersEngine(dtype="float32"))
    for real, own in zip(
        await answers(sglang(model), texts), await answers(ours, texts), strict=True
    ):
        assert real.ids == own.ids
        assert real.finish_reason == own.finish_reason
        np.testing.assert_allclose(real.log_probs, own.log_probs, atol=1e-4)
    assert processes() == []


async def test_engines_thousand_cancelled_generations_leave_sglang_idle(tmp_path: Path) -> None:
    """The clock is the scheduler's own: its decode steps are timed on the way."""
    model = save_model("qwen2", tmp_path)
    async with open_engines(sglang(model, max_queued=2000)) as pool:
        generations = [Generation() for _ in range(1000)]
        step_s = await time_of_a_step(pool)
        async with anyio.create_task_group() as tasks:
            for text, generation in zip(prompts(1000), generations, strict=True):
                tasks.start_soon(
                    partial(ask, pool, text, generation, max_new_tokens=400, ignore_eos=True)
                )
            while sum(bool(g.ids) for g in generations) < 64:
                await anyio.sleep(0.01)
            assert pool.statistics()[0].in_flight == 1000
            tasks.cancel_scope.cancel()
        cancelled_at = anyio.current_time()
        while pool.statistics()[0].zombies:
            await anyio.sleep(0.005)
        took_s = anyio.current_time() - cancelled_at
        while (load := pool.loads()["engine-0"]).running or load.queued or load.kv_used:
            await anyio.sleep(0.01)
        assert pool.statistics()[0].in_flight == 0
        assert took_s < 1 + 2 * step_s
        assert (await ask(pool, [5, 6], Generation())).finish_reason in ("stop", "length")
    assert processes() == []


async def time_of_a_step(pool: EnginePool) -> float:
    """Seconds of one decode step with a full batch."""
    generations = [Generation() for _ in range(128)]
    begun = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for text, generation in zip(prompts(128), generations, strict=True):
            tasks.start_soon(
                partial(ask, pool, text, generation, max_new_tokens=20, ignore_eos=True)
            )
    return (anyio.current_time() - begun) / 20


async def test_engines_scheduler_killed_is_replaced_and_its_requests_go_on(
    tmp_path: Path,
) -> None:
    model = save_model("qwen2", tmp_path)
    async with open_engines(sglang(model)) as pool:
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                partial(ask, pool, [5, 6, 7], generation, max_new_tokens=460, ignore_eos=True)
            )
            while not generation.ids:
                await anyio.sleep(0.002)
            victim = scheduler()
            os.kill(victim.pid, signal.SIGSTOP)  # it cannot finish before it is killed
            os.kill(victim.pid, signal.SIGKILL)
        assert (len(generation.ids), generation.finish_reason) == (460, "length")
        assert generation.resumes == 1
        assert pool.statistics()[0].starts == 2
        assert scheduler().pid != victim.pid
    assert processes() == []


async def test_engines_termination_drains_what_is_under_way(tmp_path: Path) -> None:
    model = save_model("qwen2", tmp_path)
    async with open_engines(sglang(model)) as pool:
        generation = Generation()
        (engine,) = [p for p in processes() if "rollout.engine.child" in p.cmdline()]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                partial(ask, pool, [5, 6], generation, max_new_tokens=400, ignore_eos=True)
            )
            while not generation.ids:
                await anyio.sleep(0.002)
            engine.terminate()
        assert len(generation.ids) == 400
        assert generation.finish_reason == "length"
        while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
            await anyio.sleep(0.05)


async def test_engines_model_that_sglang_cannot_load_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(EngineError, match=r"^engine-0: SGLang did not start: "):
        async with open_engines(sglang(str(tmp_path))):
            pytest.fail("opened")
    assert processes() == []


async def test_engines_interpreter_without_sglang_is_an_error(tmp_path: Path) -> None:
    model = save_model("qwen2", tmp_path)
    config = RolloutConfig(
        model=ModelConfig(path=model),
        engine=SGLangEngine(device="cpu"),
        placement=LocalProcessPlacement(python=sys.executable),
    )
    with pytest.raises(EngineError, match="needs SGLang in the engine's interpreter"):
        async with open_engines(config):
            pytest.fail("opened")
