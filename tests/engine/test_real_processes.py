"""The cases that hurt most, with the embedded engine in real processes behind real sockets."""

from __future__ import annotations

import asyncio  # noqa: TID251  (the callers of these tests run it)
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import rollout
from rollout import Outcome, Prompt, RolloutBatch, RolloutConfig, RolloutRuntime
from rollout.config import (
    LengthsConfig,
    LimitsConfig,
    RecoveryConfig,
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


async def disturbed(disturb: Any, config: RolloutConfig) -> tuple[RolloutBatch, RolloutRuntime]:
    """Generate, and call `disturb` with the engine's process once tokens are on their way."""
    async with rollout.open_rollout(config) as runtime, anyio.create_task_group() as tasks:

        async def act() -> None:
            while runtime.statistics().replicas[0].in_flight < 4:
                await anyio.sleep(0.02)
            await anyio.sleep(0.3)
            disturb(engines()[0])

        tasks.start_soon(act)
        with anyio.fail_after(90):
            batch = await runtime.generate([PROMPT], step=1)
    assert engines() == []
    return batch, runtime


@pytest.mark.slow
def test_engine_killed_without_recovery_members_fail_and_the_batch_ends() -> None:
    config = embedded(
        scheduling=SchedulingConfig(samples_per_prompt=4, max_retries=0, max_failures=None),
        recovery=RecoveryConfig(policy="fail"),
    )
    batch, _ = anyio.run(disturbed, lambda process: process.kill(), config, backend="asyncio")
    assert {(t.outcome, t.reason) for t in batch.trajectories} == {(Outcome.FAILED, "engine")}
    assert all(t.reward is None and not t.trainable for t in batch.trajectories)


@pytest.mark.slow
def test_asyncio_timeout_and_task_cancel_pass_through_and_the_runtime_stays_usable() -> None:
    async def main() -> RolloutBatch:
        async with rollout.open_rollout(embedded()) as runtime:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await runtime.generate([PROMPT])
            task = asyncio.create_task(runtime.generate([PROMPT]))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            batch = await runtime.generate([PROMPT])
            replicas = runtime.statistics().replicas
            assert [(r.in_flight, r.zombies, r.starts) for r in replicas] == [(0, 0, 1)]
            return batch

    assert len(asyncio.run(main()).trajectories) == 4
    assert engines() == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_closing_while_starting_leaves_no_process(backend: str) -> None:
    async def main() -> None:
        async def leave_when_it_starts(scope: anyio.CancelScope) -> None:
            while not engines():
                await anyio.sleep(0.01)
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave_when_it_starts, tasks.cancel_scope)
            async with rollout.open_rollout(embedded()):
                pytest.fail("it was to be cancelled before its model is loaded")

    anyio.run(main, backend=backend)
    assert engines() == []


DRIVER = """
import anyio, rollout
from test_real_processes import PROMPT, embedded
async def main():
    async with rollout.open_rollout(embedded()) as runtime:
        print("ready", flush=True)
        while True:
            await runtime.generate([PROMPT])
anyio.run(main)
"""


def test_driver_killed_in_mid_batch_no_engine_is_left_after_five_seconds() -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parent,
        text=True,
    )
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "ready\n"
        left = psutil.Process(driver.pid).children(recursive=True)
        assert len(left) == 1
        driver.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(left, timeout=5)
        assert alive == []
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


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


@pytest.mark.slow
def test_limits_hold_with_the_real_engine() -> None:
    async def main() -> RolloutBatch:
        lengths = LengthsConfig(prompt=128, response=1024)
        config = embedded(lengths=lengths, limits=LimitsConfig(batch_s=1.0))
        async with rollout.open_rollout(config) as runtime:
            return await runtime.generate([PROMPT])

    batch = anyio.run(main)
    cut = [t for t in batch.trajectories if t.outcome is Outcome.DEADLINE]
    assert cut
    assert all(t.limit_source == "limits.batch_s" for t in cut)
    assert all(t.metrics["total_s"] < 20.0 for t in cut)
    assert threading.active_count() < 20
