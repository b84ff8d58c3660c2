"""Batches of 200 trajectories over three real engine processes, to which things happen."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import psutil
import pytest

import rollout
from faulty_network import FaultyProcesses
from rollout import Outcome, Prompt, RolloutBatch, RolloutConfig, function_tool
from rollout.config import (
    CustomEngine,
    LengthsConfig,
    LimitsConfig,
    LocalProcessPlacement,
    ModelConfig,
    RouterConfig,
    SamplingConfig,
    SchedulingConfig,
    SimulatedEngine,
    TransformersEngine,
)
from rollout.engine import DiskWeights
from rollout.testing import Scenario, run_virtual, tool_call

pytestmark = pytest.mark.process
REPLICAS = 3
#: What the faults wait for, at most: a machine may be slow.
PATIENCE_S = 240.0

SCENARIO = (
    Scenario(seed=5)
    .reply("task", tool_call("add", a=2, b=3), filler=40)
    .then(tool_call("add", a=4, b=5))
    .then("Five and nine.", "Nine and five.")
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=None)
)


@function_tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def prompts(count: int = 50) -> list[Prompt]:
    return [
        Prompt(messages=[{"role": "user", "content": f"task {n}"}], uid=str(n))
        for n in range(count)
    ]


def config_of(**sections: Any) -> RolloutConfig:
    return SCENARIO.config(
        **{
            "engine": SimulatedEngine(replicas=REPLICAS),
            "placement": LocalProcessPlacement(),
            "scheduling": SchedulingConfig(samples_per_prompt=4, max_retries=0),
            **sections,
        }
    )


def engines() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "rollout.engine.channel.child" in process.as_dict(["cmdline"], ad_value=[])["cmdline"]
    ]


def tokens_of(batch: RolloutBatch) -> dict[tuple[str, int], tuple[bytes, bytes]]:
    return {
        (t.uid, t.member): (t.transcript.ids_bytes(), t.transcript.log_probs().tobytes())
        for t in batch.trajectories
    }


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, int], tuple[bytes, bytes]]:
    """The tokens of the batch where nothing happens, in virtual time."""
    config = config_of(placement=rollout.InProcessPlacement())

    async def main() -> RolloutBatch:
        async with rollout.open_rollout(config, [add]) as runtime:
            return await runtime.generate(prompts(), step=1)

    return tokens_of(run_virtual(main))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FaultyProcesses]]:
    """The placements that are opened, with connections that can fail."""
    made: list[FaultyProcesses] = []

    def make(**options: Any) -> FaultyProcesses:
        made.append(FaultyProcesses(**options))
        return made[-1]

    monkeypatch.setattr("rollout.engine.pool.opening.LocalProcess", make)
    yield made
    assert engines() == []


Act = Callable[[FaultyProcesses], None]


def kill(network: FaultyProcesses) -> None:
    engines()[0].kill()


async def suspend_for_ten_seconds(process: psutil.Process) -> None:
    process.suspend()
    await anyio.sleep(10)
    if process.is_running():
        process.send_signal(signal.SIGCONT)


async def run_disturbed(
    network: list[FaultyProcesses], config: RolloutConfig, *acts: Act | str
) -> tuple[RolloutBatch, Any]:
    """The batch, with one act after the other as tokens come; then the statistics."""
    async with rollout.open_rollout(config, [add]) as runtime:

        async def disturb(tasks: anyio.abc.TaskGroup) -> None:
            for number, act in enumerate(acts):
                while runtime.statistics().generated_tokens < 3000 * (number + 1):
                    await anyio.sleep(0.01)
                if act == "suspend":
                    tasks.start_soon(suspend_for_ten_seconds, engines()[-1])
                elif not isinstance(act, str):
                    act(network[0])

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(disturb, tasks)
                batch = await runtime.generate(prompts(), step=1)
            while runtime.statistics().zombies or any(
                replica.in_flight for replica in runtime.statistics().replicas
            ):
                await anyio.sleep(0.1)
        return batch, runtime.statistics()


def check(batch: RolloutBatch, statistics: Any, expected: Any) -> None:
    """Nothing is lost, nobody has a token twice or misses one, nothing is left."""
    assert [str(t.outcome) for t in batch.trajectories] == [str(Outcome.COMPLETED)] * 200
    assert tokens_of(batch) == expected
    assert all(t.metrics["attempts"] == 1 for t in batch.trajectories)
    assert batch.metrics["tokens/discarded"] == 0
    assert statistics.recoveries.failed == statistics.recoveries.restarted == 0
    assert all(r.in_flight == r.zombies == 0 for r in statistics.replicas)
    assert engines() == []


def strike(fault: Any, name: str = "engine-1") -> Act:
    return lambda network: network.strike(name, fault)


def cut_at_random(cuts: int) -> Act:
    """Cut all connections, and so many of those that take their places, each at some byte."""

    def act(network: FaultyProcesses) -> None:
        network.cuts = cuts
        for name in network.streams:
            network.strike(name, "cut")

    return act


FAULTS: dict[str, tuple[Act | str, ...]] = {
    "kill -9": (kill,),
    "SIGSTOP for 10 s": ("suspend",),
    "cut in mid-frame": (strike("cut"),),
    "6 cuts at random bytes": (cut_at_random(6),),
    "40 cuts at random bytes": (cut_at_random(40),),
    "never answers": (strike("mute"),),
    "garbage": (strike("garbage"),),
    "all of them": (strike("cut", "engine-0"), kill, strike("garbage", "engine-2"), "suspend"),
}
IN_CI = (("all of them", "trio"),)
CASES = [
    pytest.param(name, backend, marks=() if (name, backend) in IN_CI else pytest.mark.slow)
    for name in FAULTS
    for backend in ("trio", "asyncio")
]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_fault_under_200_trajectories_loses_nothing(
    name: str, backend: str, network: list[FaultyProcesses], undisturbed: Any
) -> None:
    batch, statistics = anyio.run(
        run_disturbed, network, config_of(), *FAULTS[name], backend=backend
    )
    check(batch, statistics, undisturbed)
    assert network[0].cuts == 0, "all cuts have been made"


def test_engines_that_say_everything_twice_and_talk_to_nobody_lose_nothing(
    network: list[FaultyProcesses], undisturbed: Any
) -> None:
    options = {**SCENARIO.to_dict()}
    stuttering = CustomEngine(
        core="faulty_cores:StutteringCore", options=options, replicas=REPLICAS
    )
    batch, statistics = anyio.run(run_disturbed, network, config_of(engine=stuttering))
    check(batch, statistics, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("blocked_s", [7.5, 60.0])
def test_trainer_that_blocks_its_own_loop_loses_no_replica(
    blocked_s: float, network: list[FaultyProcesses], undisturbed: Any
) -> None:
    import time  # noqa: TID251  (a trainer that blocks)

    async def main() -> tuple[RolloutBatch, Any]:
        async with rollout.open_rollout(config_of(), [add]) as runtime:

            async def block() -> None:
                while runtime.statistics().generated_tokens < 5000:
                    await anyio.sleep(0.01)
                time.sleep(blocked_s)  # noqa: ASYNC251

            time.sleep(blocked_s)  # noqa: ASYNC251
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(block)
                batch = await runtime.generate(prompts(), step=1)
            return batch, runtime.statistics()

    batch, statistics = anyio.run(main, backend="trio")
    assert [replica.starts for replica in statistics.replicas] == [1] * REPLICAS
    assert statistics.recoveries.resumed == 0
    check(batch, statistics, undisturbed)


def embedded(replicas: int, response: int = 64) -> RolloutConfig:
    return RolloutConfig(
        engine=TransformersEngine(replicas=replicas, dtype="float32"),
        lengths=LengthsConfig(prompt=128, response=response),
        sampling=SamplingConfig(greedy=True),
        limits=LimitsConfig(batch_s=600, generation_s=300),
        scheduling=SchedulingConfig(samples_per_prompt=3, max_retries=0),
        router=RouterConfig(strategy="round_robin"),  # so that no replica is idle
        seed=7,
    )


STORY = Prompt(messages=[{"role": "user", "content": "Tell me a story about a lighthouse."}])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("how", ["kill", "suspend"])
def test_embedded_engine_killed_or_frozen_its_requests_go_on_with_the_same_tokens(
    how: str,
) -> None:
    async def main() -> tuple[RolloutBatch, RolloutBatch]:
        async with rollout.open_rollout(embedded(2)) as runtime:
            calm = await runtime.generate([STORY], step=1)

            async def disturb() -> None:
                before = runtime.statistics().generated_tokens
                while runtime.statistics().generated_tokens < before + 50:
                    await anyio.sleep(0.01)
                getattr(engines()[0], how)()

            with anyio.fail_after(PATIENCE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(disturb)
                    return calm, await runtime.generate([STORY], step=1)

    calm, batch = anyio.run(main, backend="trio")
    assert batch.metrics["recovery/resumes"] > 0
    assert [t.outcome for t in batch.trajectories] == [t.outcome for t in calm.trajectories]
    assert tokens_of(batch).keys() == tokens_of(calm).keys()
    for one, other in zip(batch.trajectories, calm.trajectories, strict=True):
        assert one.transcript.ids_bytes() == other.transcript.ids_bytes()
        assert abs(one.transcript.log_probs() - other.transcript.log_probs()).max() < 1e-3
    assert engines() == []


@pytest.mark.slow
@pytest.mark.model
def test_embedded_engine_takes_other_weights_and_a_restarted_one_has_them_too(
    tmp_path: Any,
) -> None:
    from rollout.engine.model_files import resolve_model

    source = DiskWeights(resolve_model(ModelConfig().path))

    async def main() -> list[list[Any]]:
        seen = []
        async with rollout.open_rollout(embedded(1, response=12)) as runtime:
            for act in (None, "update", "kill"):
                if act == "update":
                    await runtime.update_weights(version=8, source=source)
                    with pytest.raises(rollout.EngineError, match=r"^engine-0: "):
                        await runtime.update_weights(version=9, source=DiskWeights(str(tmp_path)))
                elif act == "kill":
                    engines()[0].kill()
                with anyio.fail_after(PATIENCE_S):
                    batch = await runtime.generate([STORY], step=1)
                versions = batch.tensors["weight_versions"]
                seen.append([tokens_of(batch), set(versions.unique().tolist()) - {-1}])
        return seen

    first, second, third = anyio.run(main)
    assert [first[1], second[1], third[1]] == [{0}, {8}, {8}]
    assert first[0].keys() == second[0].keys() == third[0].keys()
    assert [key for key in first[0] if first[0][key][0] != third[0][key][0]] == []
