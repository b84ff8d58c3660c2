"""The real SGLang's weights change under 32 running trajectories, for every mode and source."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
import torch
from driver import (
    TURNS,
    ask,
    ask_all,
    is_greedy,
    load_networks,
    prompts,
    questions,
    shares_an_engine,
)
from safetensors.torch import load_file

from rollout.engine import DiskWeights, TensorWeights
from rollout.engine.pool.generation import Generation
from rollout.engine.weight_broadcasting import describe_tensors, send_weights
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.batch import RolloutBatch
    from rollout.engine.pool.pool import EnginePool
    from rollout.engine.weights import WeightSource

pytestmark = [pytest.mark.anyio, shares_an_engine]

RUNNING = 32
#: Tokens of each when the weights change, on average: its first turn has just begun.
STARTED = 16
ATTEMPTS = 5
#: Tokens of requests under which the engine sleeps.
SLEPT = 1200


@pytest.fixture(scope="module")
def networks(models: list[str]) -> list[Any]:
    """The same weights in transformers, which computes everything afresh."""
    return load_networks(models)


def source_of(kind: str, path: str) -> WeightSource:
    if kind == "disk":
        return DiskWeights(path)
    return TensorWeights(load_file(f"{path}/model.safetensors"), bucket_bytes=64 * 1024)


def keys_and_values(network: Any, ids: list[int]) -> Any:
    with torch.inference_mode():
        return network(torch.tensor([ids]), use_cache=True).past_key_values


async def changed_under_trajectories(
    runtime: Any, pool: EnginePool, mode: Any, source: WeightSource, first: str
) -> tuple[int, RolloutBatch]:
    """The version that came, and what the trajectories became that were running.

    On a machine that is busy the driver may be late, and find few requests under way: then again.
    """
    for _ in range(ATTEMPTS):
        version, batch = await change(runtime, pool, mode, source)
        spans = [set(versions[start:end]) for _, versions, start, end in spans_of(batch)]
        if sum(span == {version - 1, version} for span in spans) > RUNNING // 2:
            break
        if mode == "wait" and {version - 1} in spans and {version} in spans:
            break
        await pool.update_weights(version + 1, DiskWeights(first))
    else:
        pytest.fail(f"the weights never changed amid {RUNNING} trajectories")
    assert [sample.num_turns for sample in batch.samples] == [2 * TURNS] * RUNNING
    assert set(batch.tensors["weight_versions"].unique().tolist()) == {-1, version - 1, version}
    # The last turn is cut at its length, which is an outcome of its own.
    assert {sample.outcome for sample in batch.samples} <= {"completed", "length"}
    return version, batch


async def change(
    runtime: Any, pool: EnginePool, mode: Any, source: WeightSource
) -> tuple[int, RolloutBatch]:
    version = pool.router.replicas[0].weight_version + 1
    arrived = pool.statistics()[0].tokens.arrived
    batches = []

    async def generate() -> None:
        batches.append(await runtime.generate(questions(RUNNING, f"{mode} {version}")))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        while pool.statistics()[0].tokens.arrived - arrived < RUNNING * STARTED and not batches:
            await anyio.sleep(0.002)
        await pool.update_weights(version, source, mode)
    (batch,) = batches
    return version, batch


def spans_of(batch: RolloutBatch) -> Iterator[tuple[list[int], list[int], int, int]]:
    """Each generated span: all ids of its row, their versions, and where it begins and ends."""
    tensors = batch.tensors
    width = tensors["prompts"].shape[1]
    for row in range(len(batch.samples)):
        real = tensors["attention_mask"][row].bool()
        ids = tensors["input_ids"][row][real].tolist()
        padding = int((~real[:width]).sum())
        at = tensors["weight_versions"][row]
        versions = [-1] * (width - padding) + at.tolist()[: len(ids) - width + padding]
        mask = np.array(versions) >= 0
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
        for start, end in edges.reshape(-1, 2).tolist():
            yield ids, versions, start, end


@pytest.mark.parametrize("kind", ["disk", "tensors"])
async def test_abort_and_resume_goes_on_as_a_fresh_prefill_under_the_new_weights(
    kind: str, runtime: Any, pool: EnginePool, models: list[str], networks: list[Any]
) -> None:
    source = source_of(kind, models[1])
    new, batch = await changed_under_trajectories(
        runtime, pool, "abort_and_resume", source, models[0]
    )
    for ids, versions, start, end in spans_of(batch):
        first = versions.index(new, start) if new in versions[start:end] else end
        assert first == start or is_greedy(networks[0], ids, start, first)
        assert first == end or is_greedy(networks[1], ids, first, end)
        assert sorted(versions[start:end]) == versions[start:end]
        if versions[start] < new == versions[end - 1]:
            assert not is_greedy(networks[0], ids, first, end)
            count = min(end - first, 16)
            again = await ask(pool, ids[:first], Generation(), max_new_tokens=count)
            assert list(again.ids) == ids[first : first + count]
            assert again.versions == [[new, count]]


def follows_change(before: Any, after: Any, ids: Any, start: int, change: int, end: int) -> bool:
    """Whether tokens up to `change` are those of the old weights, and later ones of the new."""
    if not is_greedy(before, ids, start, change):
        return False
    if change >= end:
        return True
    return bool(is_greedy(after, ids, change, end, keys_and_values(before, ids[: change - 1])))


@pytest.mark.parametrize("kind", ["disk", "tensors"])
async def test_in_place_tokens_follow_from_old_keys_and_new_weights(
    kind: str, runtime: Any, pool: EnginePool, models: list[str], networks: list[Any]
) -> None:
    source = source_of(kind, models[1])
    before, after = networks
    new, batch = await changed_under_trajectories(runtime, pool, "in_place", source, models[0])
    for ids, versions, start, end in spans_of(batch):
        first = versions.index(new, start) if new in versions[start:end] else end
        if first == start:  # a turn that began later
            assert is_greedy(after, ids, start, end)
            continue
        # One token, sampled while the weights changed, may bear the next version.
        changes = [first, *([first + 1] if first < end else [])]
        assert any(follows_change(before, after, ids, start, each, end) for each in changes)
    assert sum(sample.metrics.get("resumes", 0) for sample in batch.samples) == 0
    late = await ask(pool, prompts(1)[0], Generation(), max_new_tokens=8)
    with pytest.raises(EngineError) as caught:
        await pool.update_weights(new + 1, DiskWeights("/nowhere"))
    assert str(caught.value) == "engine-0: /nowhere: expected a directory with safetensors"
    again = await ask(pool, prompts(1)[0], Generation(), max_new_tokens=8)
    assert (again.ids, again.versions) == (late.ids, late.versions)


async def test_wait_lets_requests_end_under_the_old_weights(
    runtime: Any, pool: EnginePool, models: list[str], networks: list[Any]
) -> None:
    source = DiskWeights(models[1])
    new, batch = await changed_under_trajectories(runtime, pool, "wait", source, models[0])
    for ids, versions, start, end in spans_of(batch):
        (version,) = set(versions[start:end])
        assert is_greedy(networks[version == new], ids, start, end)


async def test_broadcast_weights_reach_sglang(
    pool: EnginePool, models: list[str], networks: list[Any]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tensors = load_file(f"{models[1]}/model.safetensors")
    weights = describe_tensors(tensors, host="127.0.0.1", port=port, world_size=2)
    version = pool.router.replicas[0].weight_version + 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, send_weights, tensors, weights)
        await pool.update_weights(version, weights)
    text = prompts(1)[0]
    answer = await ask(pool, text, Generation())
    ids = text + list(answer.ids)
    assert is_greedy(networks[1], ids, len(text), len(ids))
    assert answer.versions == [[version, len(answer.ids)]]


async def test_sleep_under_requests_they_go_on_with_the_weights_that_come_back(
    pool: EnginePool, models: list[str], networks: list[Any]
) -> None:
    version = pool.router.replicas[0].weight_version
    texts = prompts(4)
    answers = [Generation() for _ in texts]
    async with anyio.create_task_group() as tasks:
        for text, generation in zip(texts, answers, strict=True):
            tasks.start_soon(
                partial(ask, pool, text, generation, max_new_tokens=SLEPT, ignore_eos=True)
            )
        while not all(generation.ids for generation in answers):
            await anyio.sleep(0.002)
        await pool.sleep(2)
        assert max(len(generation.ids) for generation in answers) < SLEPT
        await pool.wake_up(["weights"])
        await pool.wake_up()
    assert [generation.versions for generation in answers] == [[[version, SLEPT]]] * 4
    await pool.sleep(2)
    await pool.update_weights(version + 1, DiskWeights(models[1]))
    await pool.wake_up()
    await pool.flush_cache()
    (late,) = await ask_all(pool, texts[:1], max_new_tokens=8, ignore_eos=True)
    for network, text, answer in [
        (networks[0], *pair) for pair in zip(texts, answers, strict=True)
    ]:
        ids = text + list(answer.ids)
        assert is_greedy(network, ids, len(text), len(ids))
    ids = texts[0] + list(late.ids)
    assert is_greedy(networks[1], ids, len(texts[0]), len(ids))
