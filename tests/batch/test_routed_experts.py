"""Which experts each token was routed to: from the engine into tensors and onto disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout
from rollout import Prompt, RolloutBatch, Trajectory, function_tool
from rollout.batch import collate
from rollout.chat import Transcript
from rollout.config import LengthsConfig, RecoveryConfig, SchedulingConfig, SimulatedEngine
from rollout.engine.cores.simulated.simulated_core import SimulatedCore
from rollout.engine.cores.simulated.vocabulary import choose_expert
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

LAYERS, TOP_K, COUNT = 3, 2, 8
TWO_TURNS = (
    Scenario(seed=1, stream_interval=4)
    .experts(layers=LAYERS, top_k=TOP_K, count=COUNT)
    .reply("", tool_call("look", at="x"))
    .then("done")
)
LENGTHS = LengthsConfig(prompt=1024, response=1024)


@function_tool
def look(at: str) -> str:
    """Look.

    Args:
        at: Where.
    """
    return f"{at} is there"


def prompts(count: int = 1) -> list[Prompt]:
    return [Prompt(messages=[{"role": "user", "content": f"{at}"}]) for at in range(count)]


async def generate(scenario: Scenario, count: int = 1, **sections: Any) -> RolloutBatch:
    engine = sections.pop("engine", SimulatedEngine(routed_experts=True))
    config = scenario.config(engine=engine, lengths=LENGTHS, **sections)
    async with rollout.open_rollout(config, [look]) as runtime:
        return await runtime.generate(prompts(count), step=1)


def expected(transcript: Transcript) -> np.ndarray:
    """(T, layers, top_k): all but the last token, which nothing was computed of."""
    values = [
        [
            [choose_expert(token, at, layer, k, COUNT) for k in range(TOP_K)]
            for layer in range(LAYERS)
        ]
        for at, token in enumerate(transcript.ids().tolist())
    ]
    values[-1] = [[-1] * TOP_K] * LAYERS
    return np.array(values, dtype=np.int16)


def check(rows: list[Trajectory]) -> None:
    for row in rows:
        assert row.transcript.generated_length
        np.testing.assert_array_equal(row.transcript.routed_experts(), expected(row.transcript))


async def test_routed_experts_of_every_turn_are_in_the_tensor(rollout_clock: object) -> None:
    batch = await generate(TWO_TURNS, 2)
    check(batch.trajectories)
    experts = batch.tensors["routed_experts"].numpy()
    assert experts.shape == (2, LENGTHS.prompt + LENGTHS.response, LAYERS, TOP_K)
    assert experts.dtype == np.int16
    attended = batch.tensors["attention_mask"].numpy().astype(bool)
    for at, row in enumerate(batch.trajectories):
        assert len(row.transcript.spans) == 4  # it has called its tool
        np.testing.assert_array_equal(experts[at][attended[at]], expected(row.transcript))
        assert (experts[at][~attended[at]] == -1).all()


async def test_routed_experts_are_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, rollout_clock: object
) -> None:
    asked: list[int] = []
    real = SimulatedCore.generate

    def noting(self: Any, request: Any) -> Any:
        asked.append(request.routed_experts_start)
        return real(self, request)

    monkeypatch.setattr(SimulatedCore, "generate", noting)
    (row,) = (await generate(TWO_TURNS)).trajectories
    _, generated, *_ = row.transcript.spans
    assert asked == [0, generated.stop - 1]


async def test_routed_experts_survive_a_replica_that_dies(rollout_clock: object) -> None:
    scenario = TWO_TURNS.fault(die_after_tokens=20, replicas=(0,))
    batch = await generate(
        scenario,
        4,
        engine=SimulatedEngine(replicas=2, routed_experts=True),
        recovery=RecoveryConfig(policy="resume"),
    )
    assert sum(row.metrics["resumes"] for row in batch.trajectories) > 0
    check(batch.trajectories)


async def test_routed_experts_of_rows_without_tokens_are_unknown(rollout_clock: object) -> None:
    engine = SimulatedEngine(routed_experts=True)
    async with rollout.open_rollout(TWO_TURNS.config(engine=engine, lengths=LENGTHS)) as runtime:
        batch = await runtime.generate([*prompts(), Prompt(messages=[], uid="empty")])
    experts = batch.tensors["routed_experts"]
    assert (experts[0] >= 0).any()
    assert (experts[1] == -1).all()


async def test_routed_experts_on_disk_are_the_same(tmp_path: Path, rollout_clock: object) -> None:
    batch = await generate(TWO_TURNS, 2, scheduling=SchedulingConfig(samples_per_prompt=2))
    batch.save(tmp_path / "batch")
    loaded = RolloutBatch.load(tmp_path / "batch")
    assert loaded.tensors["routed_experts"].equal(batch.tensors["routed_experts"])
    check(loaded.trajectories)
    again = collate(loaded.trajectories, LENGTHS, 256)
    assert again.tensors["routed_experts"].equal(batch.tensors["routed_experts"])


def test_transcript_routed_experts_that_do_not_fit_are_refused() -> None:
    transcript = Transcript()
    transcript.append_prompt([1, 2])
    transcript.append_routed_experts(np.zeros((1, 2, 1), np.int16))
    with pytest.raises(ValueError, match=r"a shape of \(1, 1\) after \(2, 1\)"):
        transcript.append_routed_experts(np.zeros((1, 1, 1), np.int16))
    with pytest.raises(ValueError, match="2 tokens after 1; expected at most 2 in all"):
        transcript.append_routed_experts(np.zeros((2, 2, 1), np.int16))
    assert transcript.routed_length == 1
