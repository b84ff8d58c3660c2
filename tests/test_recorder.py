"""The recorder: what it sees, what it refuses, and the example in the guide."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import rollout
from harness import Balance, Recorder, balance_of, explore
from race_situations import add, user
from rollout import Trajectory
from rollout.config import (
    LimitsConfig,
    RecoveryConfig,
)
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

SLOW = Scenario(seed=1).reply("", filler=2000).timing(base_s=0.01, slope_s=0.0)


async def test_balance_cancelled_caller_tokens_are_undelivered_and_none_is_late() -> None:
    recorder = Recorder()
    scenario = SLOW.timing(base_s=0.1, slope_s=0.0)
    async with recorder.open_rollout(scenario.config()) as runtime:
        with anyio.move_on_after(4.95):
            await runtime.generate([user("go")])
        with anyio.move_on_after(0.5):  # the tokens on their way then are waited for
            await runtime.generate([user("go")])
    assert recorder.anomalies() == []
    balance = balance_of(runtime)
    assert balance == Balance(given=55, undelivered=55)
    assert balance.is_even


@pytest.mark.parametrize(("policy", "discarded"), [("restart", 96), ("fail", 96), ("resume", 0)])
async def test_balance_engine_dies_tokens_are_kept_or_discarded(
    policy: Any, discarded: int
) -> None:
    recorder = Recorder()
    config = SLOW.config(
        limits=LimitsConfig(trajectory_s=30), recovery=RecoveryConfig(policy=policy)
    )
    async with recorder.open_rollout(config) as runtime:
        async with anyio.create_task_group() as tasks:

            async def kill() -> None:
                await anyio.sleep(1.0)
                recorder.engines_alive()[0].kill()

            tasks.start_soon(kill)
            batch = await runtime.generate([user("go")])
    assert recorder.anomalies() == []
    (trajectory,) = batch.trajectories
    balance = balance_of(runtime)
    assert balance.discarded == trajectory.metrics["discarded_tokens"] == discarded
    assert balance.transcripts == trajectory.transcript.generated_length
    assert balance.is_even


async def test_recorder_trajectory_that_was_tampered_with_is_an_anomaly() -> None:
    recorder = Recorder()
    config = Scenario().reply("", "ok").config()
    async with recorder.open_rollout(config, reward=lambda _: 0.5) as runtime:
        batch = await runtime.generate([user("go")])
    runtime.rewarded.clear()
    batch.trajectories[0].reward = 1.0
    batch.tensors["response_mask"][0, 0] = 0
    assert recorder.anomalies() == [
        "sample 0: reward is not that of its trajectory",
        "response_mask[0, 0] is 0; expected 1",
        "0/prompt-0/0: a reward that nobody was asked for",
    ]


async def _example(recorder: Recorder) -> None:
    async def mine(trajectory: Trajectory) -> float:
        return float(len(trajectory.answer))

    scenario = Scenario().reply("2 + 3", tool_call("add", a=2, b=3)).then("It is 5.")
    tools: list[Any] = [add]
    async with recorder.open_rollout(scenario.config(), tools=tools, reward=mine) as runtime:
        question = {"role": "user", "content": "What is 2 + 3?"}
        await runtime.generate([rollout.Prompt(messages=[question])])


@pytest.mark.slow
def test_explore_example_of_the_guide_survives_every_race() -> None:
    done = explore(_example, share=0.1)
    assert min(done.steps.values()) > 100
    assert done.runs > 30
