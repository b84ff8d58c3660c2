"""The most likely tokens beside the sampled ones: asked for, carried, kept and written."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import rollout
from rollout import Outcome, Prompt, RolloutBatch, Trajectory
from rollout.chat import Transcript
from rollout.config import (
    CustomEngine,
    LengthsConfig,
    RecoveryConfig,
    RolloutConfig,
    SamplingConfig,
    SimulatedEngine,
)
from rollout.engine.core import Chunk, EngineInfo, GenerationRequest
from rollout.engine.cores.simulated.simulated_core import SimulatedCore
from rollout.engine.cores.simulated.vocabulary import VOCAB_SIZE, expected_log_prob
from rollout.errors import ConfigError
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

TWO_TURNS = Scenario(seed=1, stream_interval=3).reply("", "first answer").then("second")


class MuteCore(SimulatedCore):
    """Tells no likely tokens, and says so or says nothing."""

    def __init__(self, most: int | None, **options: Any) -> None:
        super().__init__(**options)
        self._most = most

    @property
    def info(self) -> EngineInfo:
        info = super().info
        able = msgspec.structs.replace(info.capabilities, max_top_log_probs=self._most)
        return msgspec.structs.replace(info, capabilities=able)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk]:
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield msgspec.structs.replace(chunk, top_ids=b"", top_log_probs=b"")


def prompt(uid: str = "p", **sampling: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": "hi"}], uid=uid, sampling=sampling)


def asking(count: int, **sections: Any) -> RolloutConfig:
    return TWO_TURNS.config(sampling=SamplingConfig(top_log_probs=count), **sections)


def mute(most: int | None, count: int = 0) -> RolloutConfig:
    engine = CustomEngine(core=f"{__name__}:MuteCore", options={"most": most})
    return asking(count, engine=engine, lengths=LengthsConfig(prompt=256, response=32))


async def trajectories(config: RolloutConfig, *prompts: Prompt) -> list[Trajectory]:
    async with rollout.open_rollout(config) as runtime:
        return (await runtime.generate(prompts or [prompt()], step=1)).trajectories


def check(transcript: Transcript, count: int) -> None:
    """Exactly what the simulated engine says, at generated positions only."""
    ids, log_probs = transcript.top_ids(), transcript.top_log_probs()
    assert ids.shape == log_probs.shape == (len(transcript), count)
    for at, (token, is_generated) in enumerate(
        zip(transcript.ids().tolist(), transcript.mask().tolist(), strict=True)
    ):
        if is_generated:
            first = expected_log_prob(token, at)
            assert ids[at].tolist() == [(token + rank) % VOCAB_SIZE for rank in range(count)]
            assert log_probs[at].tolist() == [first - rank for rank in range(count)]
        else:
            assert (ids[at] == -1).all()
            assert (log_probs[at] == 0).all()


async def test_top_log_probs_of_a_prompt_stand_over_the_configuration(
    rollout_clock: object,
) -> None:
    rows = await trajectories(
        asking(2), prompt("a"), prompt("b", top_log_probs=5), prompt("c", top_log_probs=0)
    )
    for row, count in zip(rows, (2, 5, 0), strict=True):
        assert row.transcript.generated_length > 10
        check(row.transcript, count)


async def test_top_log_probs_survive_a_replica_that_dies(rollout_clock: object) -> None:
    scenario = (
        Scenario(seed=2, stream_interval=1)
        .reply("", filler=40)
        .fault(die_after_tokens=12, replicas=(0,))
    )
    config = scenario.config(
        engine=SimulatedEngine(replicas=2),
        sampling=SamplingConfig(top_log_probs=2),
        recovery=RecoveryConfig(policy="resume"),
    )
    rows = await trajectories(config, *(prompt(f"{at}") for at in range(4)))
    assert sum(row.metrics["resumes"] for row in rows) > 0
    for row in rows:
        check(row.transcript, 2)


async def test_top_log_probs_on_disk_are_the_same(tmp_path: Path, rollout_clock: object) -> None:
    async with rollout.open_rollout(asking(4)) as runtime:
        batch = await runtime.generate([prompt(), prompt("none", top_log_probs=0)], step=1)
    batch.save(tmp_path / "batch")
    for was, now in zip(
        batch.trajectories, RolloutBatch.load(tmp_path / "batch").trajectories, strict=True
    ):
        np.testing.assert_array_equal(now.transcript.top_ids(), was.transcript.top_ids())
        np.testing.assert_array_equal(
            now.transcript.top_log_probs(), was.transcript.top_log_probs()
        )
    lines = (tmp_path / "batch" / "trajectories.jsonl").read_text().splitlines()
    assert ['"top_ids"' in line for line in lines] == [True, False]


async def test_top_log_probs_that_engines_cannot_tell_are_refused_at_open(
    rollout_clock: object,
) -> None:
    with pytest.raises(ConfigError, match=r"top_log_probs = 5; expected 0: the engine tells none"):
        await trajectories(mute(0, count=5))
    with pytest.raises(ConfigError, match=r"top_log_probs = 260; expected at most 259"):
        await trajectories(asking(VOCAB_SIZE + 1))


async def test_top_log_probs_that_engines_cannot_tell_reject_the_prompt(
    rollout_clock: object,
) -> None:
    bad, good = await trajectories(mute(0), prompt("bad", top_log_probs=1), prompt("good"))
    assert (bad.outcome, bad.reason) == (Outcome.REJECTED, "bad_sampling")
    assert bad.cause is not None
    assert bad.cause.message == "sampling.top_log_probs = 1; expected 0: the engine tells none"
    assert good.outcome is not Outcome.REJECTED


async def test_top_log_probs_that_an_engine_leaves_out_fail_the_request(
    rollout_clock: object,
) -> None:
    (row,) = await trajectories(mute(None, count=1))
    assert (row.outcome, row.reason) == (Outcome.FAILED, "engine")
    assert row.cause is not None
    assert "top ids with" in row.cause.message
    assert "expected sampling.top_log_probs = 1 with each" in row.cause.message


def test_transcript_top_of_another_shape_is_refused_and_changes_nothing() -> None:
    transcript = Transcript()
    transcript.append_prompt([1])
    with pytest.raises(ValueError, match=r"2 ids, most likely ones of shape \(1, 2\)"):
        transcript.append_generated(
            [2, 3],
            [0.0, 0.0],
            versions=[(0, 2)],
            finish_reason="stop",
            top=([[2, 3]], [[0.0, 0.0]]),
        )
    assert len(transcript) == 1
    assert transcript.top_ids().shape == (1, 0)
