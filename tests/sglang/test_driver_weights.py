"""The real SGLang's weights change under 32 running trajectories, for every mode and source."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
import torch
import transformers
from models import VOCABULARY, save_model
from safetensors.torch import load_file
from test_driver_engines import ask, processes, sglang

from rollout.engine import open_engines
from rollout.engine.generation import Generation
from rollout.engine.weights import DiskWeights, TensorWeights
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.pool import EnginePool

pytestmark = pytest.mark.anyio

RUNNING, NEW_TOKENS = 32, 120


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two sets of weights of one model."""
    return [
        save_model("llama", tmp_path_factory.mktemp(f"weights-{seed}"), seed) for seed in (0, 1)
    ]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """By transformers, every token from a fresh computation of the whole text."""
    model.generation_config.eos_token_id = None  # an end token is a token like any other
    with torch.inference_mode():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return answer[0, len(prompt) :].tolist()


def runs_of(generation: Generation) -> list[tuple[int, list[int]]]:
    """Versions with the ids that they sampled."""
    runs, at = [], 0
    for version, count in generation.versions:
        runs.append((version, list(generation.ids[at : at + count])))
        at += count
    assert at == len(generation.ids)
    return runs


@asynccontextmanager
async def changed_while_running(
    models: list[str], mode: Any, source: Any
) -> AsyncIterator[tuple[EnginePool, list[list[int]], list[Generation]]]:
    rng = np.random.default_rng(11)
    prompts = rng.integers(3, VOCABULARY, (RUNNING, 24)).tolist()
    generations = [Generation() for _ in prompts]
    async with open_engines(sglang(models[0], stream_interval=4)) as pool:
        async with anyio.create_task_group() as tasks:
            for prompt, generation in zip(prompts, generations, strict=True):
                tasks.start_soon(one, pool, prompt, generation)
            while sum(len(generation.ids) >= 20 for generation in generations) < RUNNING:
                await anyio.sleep(0.005)
            await pool.update_weights(8, source, mode)
        yield pool, prompts, generations
    assert processes() == []


async def one(pool: EnginePool, prompt: list[int], generation: Generation) -> None:
    await ask(pool, prompt, generation, max_new_tokens=NEW_TOKENS, ignore_eos=True)


def loaded(path: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["disk", "tensors"])
async def test_abort_and_resume_goes_on_as_a_fresh_prefill_under_the_new_weights(
    kind: str, models: list[str]
) -> None:
    source: Any = DiskWeights(models[1])
    if kind == "tensors":
        tensors = load_file(f"{models[1]}/model.safetensors")
        source = TensorWeights(tensors, bucket_bytes=64 * 1024)
    old, new = (loaded(path) for path in models)
    async with changed_while_running(models, "abort_and_resume", source) as (pool, texts, answers):
        fresh = [Generation() for _ in texts]
        for text, generation, again in zip(texts, answers, fresh, strict=True):
            (first, before), (second, after) = runs_of(generation)
            assert (first, second) == (0, 8)
            await ask(pool, text + before, again, max_new_tokens=len(after), ignore_eos=True)
            assert list(again.ids) == after
    for text, generation in list(zip(texts, answers, strict=True))[:3]:
        (_, before), (_, after) = runs_of(generation)
        assert before == greedy(old, text, len(before))
        assert after == greedy(new, text + before, len(after))
        assert after != greedy(old, text + before, len(after))


async def test_in_place_every_token_is_of_the_weights_that_its_version_names(
    models: list[str],
) -> None:
    async with changed_while_running(models, "in_place", DiskWeights(models[1])) as (
        pool,
        texts,
        answers,
    ):
        late = Generation()
        await ask(pool, texts[0], late, max_new_tokens=8)
        assert [version for version, _ in late.versions] == [8]
        with pytest.raises(EngineError) as caught:
            await pool.update_weights(9, DiskWeights("/nowhere"))
        assert str(caught.value) == "engine-0: /nowhere: expected a directory with safetensors"
        again = Generation()
        await ask(pool, texts[0], again, max_new_tokens=8)
        assert (again.ids, again.versions) == (late.ids, late.versions)
    old = loaded(models[0])
    for text, generation in list(zip(texts, answers, strict=True))[:3]:
        (first, before), (second, after) = runs_of(generation)
        assert (first, second) == (0, 8)
        assert len(generation.parts) == 1
        assert before == greedy(old, text, len(before))
        # The very next token is already another than the old weights would say, or one of the
        # few after it: the old keys and values stay, so no fresh computation gives the same.
        assert after != greedy(old, text + before, len(after))


async def test_wait_lets_requests_end_under_the_old_weights(models: list[str]) -> None:
    async with changed_while_running(models, "wait", DiskWeights(models[1])) as (
        pool,
        texts,
        answers,
    ):
        assert [generation.versions for generation in answers] == [[[0, NEW_TOKENS]]] * RUNNING
        late = Generation()
        await ask(pool, texts[0], late, max_new_tokens=8, ignore_eos=True)
        assert late.versions == [[8, 8]]
    assert list(late.ids) == greedy(loaded(models[1]), texts[0], 8)


async def test_sleep_under_requests_they_go_on_with_the_weights_that_come_back(
    models: list[str],
) -> None:
    texts = np.random.default_rng(7).integers(3, VOCABULARY, (4, 24)).tolist()
    answers = [Generation() for _ in texts]
    late = Generation()
    async with open_engines(sglang(models[0], stream_interval=4)) as pool:
        async with anyio.create_task_group() as tasks:
            for text, generation in zip(texts, answers, strict=True):
                tasks.start_soon(one, pool, text, generation)
            while not all(generation.ids for generation in answers):
                await anyio.sleep(0.005)
            await pool.sleep(2)
            assert max(len(generation.ids) for generation in answers) < NEW_TOKENS
            await pool.wake_up(["weights"])
            await pool.wake_up()
        assert [generation.versions for generation in answers] == [[[0, NEW_TOKENS]]] * 4
        await pool.sleep(2)
        await pool.update_weights(8, DiskWeights(models[1]))
        await pool.wake_up()
        await pool.flush_cache()
        await ask(pool, texts[0], late, max_new_tokens=8, ignore_eos=True)
    assert list(late.ids) == greedy(loaded(models[1]), texts[0], 8)
    old = loaded(models[0])
    for text, generation in zip(texts, answers, strict=True):
        assert list(generation.ids) == greedy(old, text, NEW_TOKENS)
