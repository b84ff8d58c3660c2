"""What every engine does wherever it lives: the pairs that need neither a GPU nor SGLang."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from pools import generate
from rollout.config import (
    CustomEngine,
    InProcessPlacement,
    LocalProcessPlacement,
    ModelConfig,
    RayPlacement,
    RolloutConfig,
    SimulatedEngine,
    TransformersEngine,
)
from rollout.engine import open_engines
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool

#: Ray's client opens connections when it needs them and keeps them.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.rollout(allow_leaks=("files", "processes")),
    pytest.mark.process,
]
PLACES: dict[str, Any] = {
    "in_process": InProcessPlacement(),
    "local_process": LocalProcessPlacement(),
    "ray": RayPlacement(address="local", gpus_per_replica=0.0, cpus_per_replica=0.0),
}
ENGINES: dict[str, Any] = {
    "simulated": SimulatedEngine(replicas=2),
    "transformers": TransformersEngine(dtype="float32", replicas=2),
    "custom": CustomEngine(
        core="fake_core:CountingCore", options={"token_s": 0.001, "vocab_size": 1000}, replicas=2
    ),
}
#: Two models in processes of their own take their time; `test_local_process` has custom ones there.
MARKS: dict[tuple[str, str], Any] = {
    ("transformers", "local_process"): [pytest.mark.model, pytest.mark.slow],
    ("transformers", "ray"): [pytest.mark.model, pytest.mark.slow],
    ("simulated", "ray"): [pytest.mark.slow],
    ("custom", "local_process"): [pytest.mark.slow],
    ("custom", "ray"): [pytest.mark.slow],
}
PAIRS = [
    pytest.param(engine, place, marks=MARKS.get((engine, place), ()))
    for engine, places in {
        "simulated": ("in_process", "local_process", "ray"),
        "transformers": ("local_process", "ray"),
        "custom": ("in_process", "local_process", "ray"),
    }.items()
    for place in places
]


@pytest.fixture
def anyio_backend() -> str:
    """Real time."""
    return "trio"


def config(engine: str, place: str) -> RolloutConfig:
    is_simulated = engine == "simulated"
    model = ModelConfig(path="simulated") if is_simulated else ModelConfig()
    return RolloutConfig(model=model, engine=ENGINES[engine], placement=PLACES[place])


async def ask(pool: EnginePool, prompt: list[int], generation: Generation, count: int) -> None:
    await generate(pool, prompt, count, generation, temperature=0.0, ignore_eos=True, seed=7)


async def answers(pool: EnginePool) -> list[list[int]]:
    generations = [Generation() for _ in range(6)]
    async with anyio.create_task_group() as tasks:
        for number, generation in enumerate(generations):
            tasks.start_soon(ask, pool, [5, 6, 7, 60 + number], generation, 8)
    assert all(len(g.ids) == len(g.log_probs) == 8 for g in generations)
    assert {g.finish_reason for g in generations} == {"length"}
    return [list(generation.ids) for generation in generations]


@pytest.mark.parametrize(("engine", "place"), PAIRS)
async def test_engine_answers_and_is_aborted_wherever_it_lives(engine: str, place: str) -> None:
    async with open_engines(config(engine, place)) as pool:
        assert pool.info.core
        assert await answers(pool) == await answers(pool)  # the same seeds, the same tokens
        cut = Generation()
        with anyio.move_on_after(60) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, pool, [5, 6, 7], cut, 4000)
                while not cut.ids:
                    await anyio.sleep(0.01)
                tasks.cancel_scope.cancel()
        assert not scope.cancelled_caught
        with anyio.fail_after(60):
            while any(replica.in_flight for replica in pool.statistics()):
                await anyio.sleep(0.01)
        assert [replica.zombies for replica in pool.statistics()] == [0, 0]
