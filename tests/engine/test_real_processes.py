"""The cases that hurt most, with the embedded engine in real processes behind real sockets."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import anyio
import psutil
import pytest

import rollout
from rollout import Outcome, Prompt, RolloutBatch, RolloutConfig, RolloutRuntime
from rollout.config import (
    LengthsConfig,
    SamplingConfig,
    SchedulingConfig,
)

pytestmark = [pytest.mark.model, pytest.mark.process]

PROMPT = Prompt(
    messages=[{"role": "user", "content": "Tell me a long story about a lighthouse."}], uid="story"
)


def embedded(**sections: Any) -> RolloutConfig:
    return RolloutConfig(
        sampling=SamplingConfig(temperature=0.7),
        **{
            "lengths": LengthsConfig(prompt=128, response=96),
            "scheduling": SchedulingConfig(samples_per_prompt=4, max_retries=2),
            "seed": 7,
            **sections,
        },
    )


def engines() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "rollout.engine.channel.child" in process.as_dict(["cmdline"], ad_value=[])["cmdline"]
    ]


STUCK = """
import anyio, threading, rollout
from rollout import LimitsConfig, Prompt, function_tool
from rollout.testing import Scenario, tool_call

@function_tool
def stuck() -> str:
    "Never return."
    threading.Event().wait()
    return ""

async def main():
    config = Scenario(seed=1).reply("go", tool_call("stuck")).then("gave up").config(
        limits=LimitsConfig(tool_s=0.2)
    )
    async with rollout.open_rollout(config, [stuck]) as runtime:
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": "go"}])])
        print(batch.trajectories[0].answer, runtime.statistics().abandoned_threads, flush=True)

anyio.run(main, backend="%s")
print("closed", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_tool_thread_never_returns_close_and_exit_are_not_delayed(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK % backend],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "gave up {'stuck': 1}\nclosed\n"


@pytest.mark.slow
def test_cancelled_trajectories_keep_all_that_the_engine_had_sampled() -> None:
    async def main() -> tuple[RolloutBatch, RolloutRuntime]:
        config = embedded(
            lengths=LengthsConfig(prompt=128, response=1024),
            scheduling=SchedulingConfig(samples_per_prompt=12),
        )
        async with rollout.open_rollout(config) as runtime, anyio.create_task_group() as tasks:

            async def stop() -> None:
                while runtime.engines.tokens_under_way < 60:
                    await anyio.sleep(0.02)
                runtime.cancel(reason="enough")

            tasks.start_soon(stop)
            return await runtime.generate([PROMPT]), runtime

    batch, runtime = anyio.run(main)
    lengths = [trajectory.transcript.generated_length for trajectory in batch.trajectories]
    (replica,) = runtime.statistics().replicas
    assert {t.outcome for t in batch.trajectories} == {Outcome.CANCELLED}
    assert min(lengths) > 0
    assert (sum(lengths), replica.tokens.late) == (replica.tokens.taken, 0)
