"""What becomes of requests whose replica is lost, and of replicas at run time; virtual time."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import msgspec
import pytest

import rollout
from faulty_cores import POISON
from harness import Recorder
from pools import generate as ask
from rollout import Outcome, Prompt
from rollout.config import SchedulingConfig, SimulatedEngine
from rollout.engine.core import Chunk, GenerationRequest, unpack_ids
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.routing import Router
from rollout.engine.weights import DiskWeights
from rollout.errors import EngineError
from rollout.testing import Scenario

pytestmark = [pytest.mark.anyio, pytest.mark.rollout(ceiling_s=3000)]


def pool_of(
    replicas: int = 1, core: str = "MortalCore", *, options: Any = None, **pool: Any
) -> EnginePool:
    def spec_of(index: int) -> CoreSpec:
        return CoreSpec(f"faulty_cores:{core}", {"token_s": 1.0, "index": index, **(options or {})})

    return EnginePool(
        placement=InProcess(max_read=11),
        specs=[spec_of(index) for index in range(replicas)],
        make_spec=spec_of,
        router=Router(),
        start_timeout_s=5,
        **pool,
    )


async def disturbed(
    pool: EnginePool, disturb: Callable[[], Any], at: float, generation: Generation, **options: Any
) -> None:
    """Ask for ten tokens after 100, and disturb that."""
    async with anyio.create_task_group() as tasks:

        async def act() -> None:
            await anyio.sleep(at)
            disturb()

        tasks.start_soon(act)
        await ask(pool, [5, 100], 10, generation, **options)


def core_of(cores: list[Any], name: str) -> Any:
    """The engine that a replica runs now."""
    return next(core for core in reversed(cores) if f"engine-{core.index}" == name)


def killing(cores: list[Any], generation: Generation) -> Callable[[], None]:
    return lambda: core_of(cores, generation.replica).on_death()


# Policies.


async def test_resume_goes_on_elsewhere_from_the_tokens_that_it_has(cores: list[Any]) -> None:
    async with pool_of(2).serving() as pool:
        generation, start = Generation(), anyio.current_time()
        await disturbed(pool, killing(cores, generation), 3.5, generation)
        took = anyio.current_time() - start
    assert list(generation.ids) == list(range(101, 111))
    assert list(generation.log_probs) == [-n / 8 for n in range(101, 111)]
    assert generation.versions == [[3, 10]]
    assert generation.finish_reason == "length"
    assert (generation.resumes, generation.restarts, generation.discarded_tokens) == (1, (), 0)
    first, second = generation.parts
    assert (first.count, second.start, second.count) == (3, 3, 7)
    assert first.replica != second.replica
    assert took == pytest.approx(3.5 + 7.0)
    (sent,) = core_of(cores, second.replica.name).requests
    assert list(unpack_ids(sent.prompt_ids)) == [5, 100, 101, 102, 103]
    assert sent.sampling.max_new_tokens == 7


async def test_restart_begins_anew_and_says_so(cores: list[Any]) -> None:
    async with pool_of(2, policy="restart").serving() as pool:
        generation = Generation()
        await disturbed(pool, killing(cores, generation), 3.5, generation)
        assert pool.recoveries.restarted == 1
    assert list(generation.ids) == list(range(101, 111))
    assert generation.discarded_tokens == 3
    assert [part.start for part in generation.parts] == [0, 0]
    (why,) = generation.restarts
    assert why.endswith("(recovery.policy)")


async def test_fail_fails_the_request_and_keeps_its_tokens(cores: list[Any]) -> None:
    async with pool_of(2, policy="fail").serving() as pool:
        generation = Generation()
        with pytest.raises(BaseExceptionGroup) as caught:
            await disturbed(pool, killing(cores, generation), 3.5, generation)
        assert isinstance(caught.value.exceptions[0], EngineError)
    assert list(generation.ids) == [101, 102, 103]
    assert generation.finish_reason == "error"


@pytest.mark.parametrize(
    ("count", "stops", "reason"), [(3, (), "length"), (10, (103,), "stop"), (3, (103,), "stop")]
)
async def test_cut_at_the_very_end_asks_for_no_token_more(
    count: int, stops: tuple[int, ...], reason: str, cores: list[Any], monkeypatch: Any
) -> None:
    async def generate(self: Any, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        for offset in range(3):
            yield Chunk(
                request_id=request.request_id,
                offset=offset,
                ids=array("i", [101 + offset]).tobytes(),
                log_probs=array("f", [0.0]).tobytes(),
            )
        await anyio.sleep_forever()  # the last chunk, with the finish reason, is still to come

    async with pool_of(2).serving() as pool:
        for core in cores:
            monkeypatch.setattr(core, "generate", generate.__get__(core))
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: ask(pool, [5, 100], count, generation, stop_token_ids=stops))
            await anyio.sleep(1)
            killing(cores, generation)()
        assert list(generation.ids) == [101, 102, 103]
        assert generation.finish_reason == reason
        assert sum(len(core.requests) for core in cores) == 1


# What counts as broken.


async def _ask_poison(pool: EnginePool, generation: Generation) -> None:
    with pytest.raises(EngineError) as caught:
        await ask(pool, [POISON, 7], 40, generation)
    assert caught.value.reason == "lost_engines"
    text = str(caught.value)
    assert text.startswith("3 engines were lost with the request of s7 in flight (engine-")
    assert all(part.replica.name in text for part in generation.parts)


async def test_deaths_in_a_row_the_pauses_grow_until_it_has_served_for_a_minute(
    cores: list[Any],
) -> None:
    pauses = []
    async with pool_of(1).serving() as pool:
        for served_s in (0.0, 0.0, 0.0, 70.0):
            await anyio.sleep(served_s)
            died_at = anyio.current_time()
            cores[-1].on_death()
            lives = pool.statistics()[0].starts
            while pool.statistics()[0].starts == lives:
                await anyio.sleep(0.25)
            pauses.append(anyio.current_time() - died_at)
            *before, last = [core.is_closed for core in cores]
            assert (all(before), last) == (True, False), "the old one is closed first"
    assert [int(pause) for pause in pauses] == [1, 2, 4, 1]


# Requests that engines are lost with.


#: What an engine says that breaks of a poisonous prompt; one that dies says nothing.
LAST_WORDS = {
    "exit": "",
    "late": "",
    "memory": "no room for 13",
    "broken": "fallen off",
    "fatal": "CUDA out of",
}


@pytest.mark.parametrize("poison", LAST_WORDS)
async def test_poison_fails_after_three_engines_and_its_siblings_go_on(
    poison: str, cores: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with pool_of(8, options={"token_s": 0.1, "poison": poison}).serving() as pool:
        others = [Generation() for _ in range(8)]
        doomed = Generation()
        async with anyio.create_task_group() as tasks:
            for number, other in enumerate(others):
                tasks.start_soon(ask, pool, [5, 100 + number], 30, other)
            tasks.start_soon(_ask_poison, pool, doomed)
        for number, other in enumerate(others):
            assert list(other.ids) == list(range(101 + number, 131 + number))
            assert other.discarded_tokens == 0
        lost = [message for message in caplog.messages if message.startswith("lost engine-")]
        assert len(lost) == 3
        assert all(LAST_WORDS[poison] in message for message in lost)
        await anyio.sleep(10)
        assert len(doomed.parts) == sum(r.starts for r in pool.statistics()) - 8 == 3
        assert pool.recoveries.failed == 1


async def test_request_that_was_there_at_two_losses_completes(cores: list[Any]) -> None:
    async with pool_of(2, options={"token_s": 0.1}).serving() as pool:
        generations = [Generation() for _ in range(20)]
        async with anyio.create_task_group() as tasks:
            for number, generation in enumerate(generations):
                tasks.start_soon(ask, pool, [5, 100 + number], 60, generation)
            for at in (1.05, 1.0):
                await anyio.sleep(at)
                next(core for core in cores if not core.is_closed).on_death()
        for number, generation in enumerate(generations):
            assert list(generation.ids) == list(range(101 + number, 161 + number))
        assert pool.recoveries.failed == 0
        assert pool.recoveries.resumed >= 30


def cut(pool: EnginePool) -> None:
    """Break the connection of a replica, whose engine lives on."""
    channel = pool._replicas["engine-0"].channel
    assert channel is not None
    channel.lose("the connection broke", "connection")


async def test_cut_connection_is_replaced_and_the_engine_lives_on(cores: list[Any]) -> None:
    async with updatable(replicas=1).serving() as pool:
        await pool.update_weights(4, DiskWeights("w4"))
        generation = Generation()
        await disturbed(pool, lambda: cut(pool), 2.5, generation)
        assert list(generation.ids) == list(range(101, 111))
        assert generation.versions == [[4, 10]]
        assert (generation.resumes, generation.discarded_tokens) == (1, 0)
        (core,) = cores
        assert core.loaded == ["w4"]
        assert pool.statistics()[0].starts == 2
        assert not core._aborted


async def test_connection_that_is_cut_again_and_again_ends_the_request_at_twenty(
    cores: list[Any],
) -> None:
    async with pool_of(1).serving() as pool:
        generation, cuts = Generation(), 0

        async def cut_often() -> None:
            nonlocal cuts
            while generation.finish_reason != "error":
                await anyio.sleep(1.5)
                if pool.statistics()[0].in_flight:
                    cut(pool)
                    cuts += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cut_often)
            with pytest.raises(EngineError, match=r"^20 connections were lost with the ") as caught:
                await ask(pool, [5, 100], 500, generation)
        assert caught.value.reason == "lost_engines"
        assert (cuts, len(cores)) == (20, 1)
        assert list(generation.ids) == list(range(101, 101 + generation.count))


async def test_engine_whose_weights_are_not_those_it_was_sent_is_restarted(
    cores: list[Any],
) -> None:
    async with updatable(replicas=1).serving() as pool:
        await pool.update_weights(4, DiskWeights("w4"))
        cores[0].info = msgspec.structs.replace(cores[0].info, weight_version=3)
        cut(pool)
        assert (await ask(pool, [5, 100], 2)).versions == [[4, 2]]
        assert [core.loaded for core in cores] == [["w4"], ["w4"]]


async def test_removed_replicas_and_weights_count_for_no_request(cores: list[Any]) -> None:
    async with updatable(replicas=1).serving() as pool:
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, [5, 100], 60, generation)
            for number in range(5):
                await anyio.sleep(3)
                await pool.add_replica()
                await pool.remove_replica(f"engine-{number}", drain_s=0.0)
        assert list(generation.ids) == list(range(101, 161))
        assert generation.resumes == 5


# Replicas at run time.


async def test_no_replica_left_one_that_is_added_takes_over(cores: list[Any]) -> None:
    async with pool_of(1, backoff_s=1000.0).serving() as pool:
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, [5, 100], 4, generation)
            await anyio.sleep(2.5)
            cores[0].on_death()
            await anyio.sleep(100)
            assert await pool.add_replica() == "engine-1"
        assert list(generation.ids) == [101, 102, 103, 104]
        assert anyio.current_time() == pytest.approx(2.5 + 100 + 2.0)


async def test_add_replica_gets_work_and_does_not_start_twice_under_one_name(
    cores: list[Any],
) -> None:
    options = {"token_s": 1.0, "max_requests": 1}
    async with pool_of(1, options=options).serving() as pool:
        generations = [Generation(), Generation()]
        async with anyio.create_task_group() as tasks:
            for number, generation in enumerate(generations):
                tasks.start_soon(ask, pool, [5, 100 + number], 4, generation)
            await anyio.sleep(0.5)
            assert await pool.add_replica(load_share=2.0) == "engine-1"
        assert anyio.current_time() == pytest.approx(4.5)
        assert {g.replica for g in generations} == {"engine-0", "engine-1"}
        assert pool.router.replicas[1].weight == 2.0
        await pool.remove_replica("engine-1")
        assert await pool.add_replica() == "engine-2"
        assert [r.state for r in pool.statistics()] == ["serving", "removed", "serving"]


async def test_remove_replica_lets_its_requests_end(cores: list[Any]) -> None:
    async with pool_of(2).serving() as pool:
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, [5, 100], 4, generation)
            await anyio.sleep(1.5)
            await pool.remove_replica(generation.replica)
            assert generation.finish_reason == "length"
        assert generation.resumes == 0
        with pytest.raises(EngineError, match="there is no replica 'engine-"):
            pool.drain(generation.replica)


async def test_remove_replica_in_a_hurry_its_requests_go_on_elsewhere(cores: list[Any]) -> None:
    async with pool_of(2).serving() as pool:
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, [5, 100], 6, generation)
            await anyio.sleep(1.5)
            await pool.remove_replica(generation.replica, drain_s=1.0)
        assert list(generation.ids) == list(range(101, 107))
        assert (generation.resumes, len(generation.parts)) == (1, 2)


async def test_remove_replica_cancelled_while_it_drains_the_replica_stays(
    cores: list[Any],
) -> None:
    async with pool_of(1).serving() as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, [5, 100], 6)
            await anyio.sleep(1.5)
            with anyio.move_on_after(1):
                await pool.remove_replica("engine-0")
        assert list((await ask(pool, [5, 100], 2)).ids) == [101, 102]


async def test_drained_replica_dies_it_comes_back_drained(cores: list[Any]) -> None:
    async with pool_of(2).serving() as pool:
        pool.drain("engine-0")
        core_of(cores, "engine-0").on_death()
        await anyio.sleep(5)
        assert states(pool) == {"engine-0": "draining", "engine-1": "serving"}
        assert {(await ask(pool, [5, n], 1)).replica for n in range(4)} == {"engine-1"}
        pool.resume("engine-0")
        assert states(pool) == {"engine-0": "serving", "engine-1": "serving"}


def states(pool: EnginePool) -> dict[str, str]:
    return {replica.name: replica.state for replica in pool.router.replicas}


# Weights.


def updatable(replicas: int = 2, **options: Any) -> EnginePool:
    return pool_of(replicas, "UpdatableCore", options={"token_s": 1.0, **options})


async def test_replica_starts_while_weights_change_it_gets_the_last_ones(
    cores: list[Any],
) -> None:
    async with updatable(1, load_s=3.0).serving() as pool:
        await pool.update_weights(1, DiskWeights("w1"))
        cores[0].on_death()
        await anyio.sleep(2.0)  # it loads w1 again
        await pool.update_weights(2, DiskWeights("w2"))
        assert (await ask(pool, [5, 1], 1)).versions == [[2, 1]]
        assert cores[1].loaded == ["w1", "w2"]
        added = await pool.add_replica()
        assert added == "engine-1"
        assert cores[2].loaded == ["w2"]


async def test_update_weights_core_that_cannot_says_so(cores: list[Any]) -> None:
    async with pool_of(1).serving() as pool:
        with pytest.raises(EngineError) as caught:
            await pool.update_weights(1, DiskWeights("w"))
    assert str(caught.value) == "engine-0: MortalCore has no method update_weights"


async def test_update_weights_cancelled_caller_leaves_the_engines_to_it(
    cores: list[Any],
) -> None:
    async with updatable(load_s=4.0).serving() as pool:
        with anyio.move_on_after(1):
            await pool.update_weights(1, DiskWeights("w1"))
        assert (await ask(pool, [5, 1], 1)).versions == [[1, 1]]
        assert anyio.current_time() == pytest.approx(5.0)


# Seen from a trajectory.


def user(text: str) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], uid="p")


@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 0.1}])
async def test_trajectory_says_what_was_done_about_it(sampling: dict[str, float]) -> None:
    scenario = Scenario(seed=1).reply("", filler=100).fault(die_after_tokens=150, replicas=(0,))
    recorder = Recorder()
    config = scenario.config(
        engine=SimulatedEngine(replicas=2), scheduling=SchedulingConfig(samples_per_prompt=4)
    )
    async with recorder.open_rollout(config) as runtime:
        batch = await runtime.generate([Prompt(messages=user("go").messages, sampling=sampling)])
        statistics = runtime.statistics()
    assert recorder.anomalies() == []
    assert {t.outcome for t in batch.trajectories} == {Outcome.COMPLETED}
    done, told = statistics.recoveries, [t for t in batch.trajectories if "restarts" in t.extra]
    assert batch.metrics["recovery/resumes"] == done.resumed
    assert batch.metrics["recovery/restarts"] == done.restarted == len(told)
    assert (done.resumed > 0, done.restarted > 0) == (not sampling, bool(sampling))
    assert (batch.metrics["tokens/discarded"] > 0) == bool(sampling)
    for trajectory in told:
        (why,) = trajectory.extra["restarts"]
        assert why.startswith("engine-0: ")
        assert why.endswith(f"(sampling.{next(iter(sampling))})")
    assert statistics.zombies == 0


async def test_trajectory_whose_request_kills_engines_fails_and_is_not_run_again() -> None:
    scenario = Scenario(seed=1).reply("", filler=200).fault(die_after_tokens=50)
    config = scenario.config(engine=SimulatedEngine(replicas=2))
    async with rollout.open_rollout(config) as runtime:
        batch = await runtime.generate([user("go")])
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "lost_engines")
    assert trajectory.metrics["attempts"] == 1
    assert trajectory.cause is not None
    assert "3 engines were lost with the request of " in trajectory.cause.message
    assert trajectory.transcript.generated_length > 0
