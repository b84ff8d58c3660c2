"""Trajectories carried across a weight update on the real SGLang, log-probs recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest
import torch
from driver import load_networks, questions, shares_an_engine

from rollout import GroupPolicy
from rollout.engine import DiskWeights

if TYPE_CHECKING:
    from rollout import Trajectory
    from rollout.engine.pool.pool import EnginePool

pytestmark = [pytest.mark.anyio, shares_an_engine]

CARRIED = 16
#: Tokens of each when it is carried, on average: its first turn is under way.
STARTED = 24
ATTEMPTS = 5


async def carried(runtime: Any, pool: EnginePool, source: Any) -> int:
    """Start groups, and leave them unfinished; how many."""
    arrived = pool.statistics()[0].tokens.arrived
    async with runtime.stream_groups(source, policy=GroupPolicy(surplus="carry")):
        while pool.statistics()[0].tokens.arrived - arrived < CARRIED * STARTED:
            await anyio.sleep(0.002)
    count: int = runtime.statistics().carried
    return count


def log_probs(networks: list[Any], versions: list[int], trajectory: Trajectory) -> torch.Tensor:
    """(T,) of the sampled tokens, each under the weights whose version it carries."""
    transcript = trajectory.transcript
    ids = torch.tensor([memoryview(transcript.ids_bytes()).cast("i").tolist()])
    at = torch.from_numpy(transcript.weight_versions().copy())
    with torch.inference_mode():
        each = [network(ids).logits[0].log_softmax(-1) for network in networks]
    places = [int(place) for place in torch.nonzero(torch.from_numpy(transcript.mask()))[:, 0]]
    chosen = [each[versions.index(int(at[place]))][place - 1, ids[0, place]] for place in places]
    return torch.stack(chosen)


async def test_carried_trajectories_log_probs_are_those_of_each_version(
    runtime: Any, pool: EnginePool, models: list[str]
) -> None:
    networks = load_networks(models)
    for attempt in range(ATTEMPTS):
        first = pool.weight_version
        source = [
            msgspec.structs.replace(prompt, sampling={"temperature": 1.0}, uid=f"{attempt}-{at}")
            for at, prompt in enumerate(questions(CARRIED, f"carry {attempt}"))
        ]
        if await carried(runtime, pool, source) >= CARRIED // 2:
            break
        await runtime.discard_carried()
    else:
        pytest.fail("nothing was under way when the stream was left")
    await runtime.update_weights(version=first + 1, source=DiskWeights(models[1]))
    batch = await runtime.collect(source, CARRIED)
    assert runtime.statistics().carried == 0
    spans = [sorted(each.transcript.versions) for each in batch.trajectories]
    assert sum(span == [first, first + 1] for span in spans) >= CARRIED // 2
    ratios = []
    for trajectory in batch.trajectories:
        transcript = trajectory.transcript
        mask = torch.from_numpy(transcript.mask())
        sampled = torch.from_numpy(transcript.log_probs().copy())[mask]
        recomputed = log_probs(networks, [first, first + 1], trajectory)
        ratios.append((recomputed - sampled).exp())
        assert trajectory.metrics["discarded_tokens"] == 0
    assert float(torch.cat(ratios).mean()) == pytest.approx(1.0, abs=1e-3)
