"""Replicas that do not start again, and what is theirs when they are removed; virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import anyio
import pytest

import faulty_cores
from harness import Recorder
from pools import generate
from rollout import Outcome, Prompt, RolloutConfig
from rollout.config import (
    CustomEngine,
    HttpEngine,
    InProcessPlacement,
    RecoveryConfig,
    SimulatedEngine,
)
from rollout.engine import open_engines
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.placement import CoreSpec, ReplicaHandle
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.errors import EngineError
from rollout.testing import Scenario

pytestmark = [pytest.mark.anyio, pytest.mark.rollout(ceiling_s=1_000_000)]

PATIENCE_S = 20.0


class Machine(InProcess):
    """Starts engines or refuses to.

    Attributes:
        refusals: Of the replicas that do not start, why.
        starts_s: When each replica was started.
        start_s: How long a refusal takes.
        specs: What was started, by replica.
        kept: Replicas for which something is kept.
    """

    def __init__(self) -> None:
        super().__init__(max_read=11)
        self.refusals: dict[str, str] = {}
        self.starts_s: dict[str, list[float]] = {}
        self.start_s = 0.0
        self.specs: dict[str, CoreSpec] = {}
        self.kept: set[str] = set()

    @asynccontextmanager
    async def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AsyncIterator[ReplicaHandle]:
        self.kept.add(name)
        self.specs[name] = spec
        self.starts_s.setdefault(name, []).append(anyio.current_time())
        why = self.refusals.get(name)
        if why is not None:
            await anyio.sleep(self.start_s)
            raise EngineError(why)
        counting = CoreSpec("faulty_cores:MortalCore", {"token_s": 1.0, "index": spec.slot})
        async with super().open_replica(name, counting, start_timeout_s) as handle:
            yield handle

    async def release(self, name: str) -> None:
        self.kept.remove(name)


@asynccontextmanager
async def opened(machine: Machine, replicas: int = 1, **recovery: Any) -> AsyncIterator[EnginePool]:
    config = RolloutConfig(
        engine=CustomEngine(core="any:Core", replicas=replicas, start_timeout_s=PATIENCE_S),
        placement=InProcessPlacement(),
        recovery=RecoveryConfig(**recovery),
    )
    async with open_engines(config, placement=machine) as pool:
        yield pool
    assert machine.kept == set()


async def ask(pool: EnginePool, last: int, count: int = 1) -> Generation:
    generation = await generate(pool, [5, last], count)
    assert list(generation.ids) == list(range(last + 1, last + 1 + count))
    return generation


async def fail_to_ask(pool: EnginePool, last: int, errors: dict[int, tuple[Any, str]]) -> None:
    with pytest.raises(EngineError) as caught:
        await ask(pool, last, 100)
    assert caught.value.reason == "no_engine"
    errors[last] = anyio.current_time(), str(caught.value)


def break_all(machine: Machine, cores: list[Any], **refusals: str) -> None:
    """None of them starts again."""
    machine.refusals = {name.replace("_", "-"): why for name, why in refusals.items()}
    for core in cores:
        core.on_death()


async def serve(pool: EnginePool) -> None:
    while {replica.state for replica in pool.statistics()} != {"serving"}:
        await anyio.sleep(0.25)


async def test_replica_does_not_start_again_the_pauses_grow_to_the_longest(
    cores: list[Any],
) -> None:
    """However long it takes to say so."""
    machine, start_s = Machine(), 100.0
    async with opened(machine) as pool:
        machine.start_s = start_s
        break_all(machine, cores, engine_0="no")
        await anyio.sleep(12 * (start_s + 30))
        (replica,) = pool.statistics()
        assert (replica.state, replica.last_error) == ("restarting", "engine-0: no")
        assert machine.kept == {"engine-0"}
        starts = machine.starts_s["engine-0"][1:11]
        pauses = [later - start_s - at for at, later in pairwise(starts)]
        assert [round(pause) for pause in pauses] == [2, 4, 8, 16, 30, 30, 30, 30, 30]
        machine.refusals.clear()
        await serve(pool)
        assert (await ask(pool, 1)).count == 1
        (replica,) = pool.statistics()
        assert (replica.state, replica.starts, replica.last_error) == ("serving", 2, "")


async def test_none_serves_generations_fail_after_the_patience_with_each_last_error(
    cores: list[Any],
) -> None:
    machine, errors = Machine(), dict[int, tuple[Any, str]]()
    async with opened(machine, 3) as pool:
        async with anyio.create_task_group() as tasks:
            for last in (100, 200, 300):
                tasks.start_soon(fail_to_ask, pool, last, errors)
            await anyio.sleep(2.5)
            died_at = anyio.current_time()
            whys = ("engine-0: out of memory", "no such node", "engine-2: bad card")
            break_all(machine, cores, **{f"engine_{index}": why for index, why in enumerate(whys)})
            await anyio.sleep(PATIENCE_S / 2)
            tasks.start_soon(fail_to_ask, pool, 400, errors)  # it comes while none serves
        expected = (
            "no engine is left: engine-0: out of memory; engine-1: no such node; engine-2: bad card"
        )
        assert errors == {
            last: (pytest.approx(died_at + PATIENCE_S), expected) for last in (100, 200, 300, 400)
        }
        await anyio.sleep(500)
        await fail_to_ask(pool, 500, errors)  # it need not wait again
        assert errors[500] == (anyio.current_time(), expected)
        machine.refusals.clear()
        await anyio.sleep(31)
        assert (await ask(pool, 600)).count == 1


async def test_none_serves_and_one_comes_back_in_time_generations_go_on(cores: list[Any]) -> None:
    machine = Machine()
    async with opened(machine, 2) as pool:
        generations: list[Generation] = []

        async def run(last: int) -> None:
            generations.append(await ask(pool, last, 6))

        async with anyio.create_task_group() as tasks:
            for last in (100, 200):
                tasks.start_soon(run, last)
            await anyio.sleep(2.5)
            break_all(machine, cores, engine_0="no", engine_1="no")
            await anyio.sleep(PATIENCE_S - 6)
            del machine.refusals["engine-1"]  # within the pause of 8 s
        assert [each.resumes for each in generations] == [1, 1]
        assert {each.replica for each in generations} == {"engine-1"}
        lost, serving = pool.statistics()
        assert (lost.state, lost.last_error) == ("restarting", "engine-0: no")
        assert (serving.state, serving.last_error) == ("serving", "")


@pytest.mark.parametrize("wait_s", [5.0, None])
async def test_patience_that_is_written_out_holds(cores: list[Any], wait_s: float | None) -> None:
    machine, errors = Machine(), dict[int, tuple[Any, str]]()
    async with opened(machine, wait_s=wait_s) as pool:
        break_all(machine, cores, engine_0="no")
        start = anyio.current_time()
        with anyio.move_on_after(1000):
            await fail_to_ask(pool, 1, errors)
        assert anyio.current_time() - start == pytest.approx(wait_s or 1000)


async def test_removed_replica_that_could_not_start_is_gone_and_no_reason_any_more(
    cores: list[Any],
) -> None:
    machine, errors = Machine(), dict[int, tuple[Any, str]]()
    async with opened(machine, 2) as pool:
        break_all(machine, cores, engine_0="no", engine_1="never")
        await anyio.sleep(5)
        await pool.remove_replica("engine-0")
        assert machine.kept == {"engine-1"}
        await fail_to_ask(pool, 1, errors)
        assert errors[1][1] == "no engine is left: engine-1: never"
        await pool.remove_replica("engine-1")
        await fail_to_ask(pool, 2, errors)
        assert errors[2][1] == "no engine is left: all were removed"
        assert await pool.add_replica() == "engine-2"
        assert (await ask(pool, 3)).count == 1


async def test_added_replica_that_does_not_start_leaves_nothing_kept(cores: list[Any]) -> None:
    machine = Machine()
    machine.refusals = {"engine-1": "no room"}
    async with opened(machine) as pool:
        with pytest.raises(EngineError, match="no room"):
            await pool.add_replica()
        assert machine.kept == {"engine-0"}
        machine.start_s = 100.0
        machine.refusals = {"engine-2": "no room"}
        with anyio.move_on_after(5):
            await pool.add_replica()
        assert machine.kept == {"engine-0"}
        assert await pool.add_replica() == "engine-3"
        assert machine.specs["engine-3"].slot == 1


async def test_added_replica_takes_the_lowest_slot_that_is_free(cores: list[Any]) -> None:
    machine = Machine()
    async with opened(machine, 3) as pool:
        assert [machine.specs[f"engine-{n}"].slot for n in range(3)] == [0, 1, 2]
        await pool.remove_replica("engine-2")
        await pool.remove_replica("engine-0")
        for name, slot in (("engine-3", 0), ("engine-4", 2), ("engine-5", 3)):
            assert await pool.add_replica() == name
            assert machine.specs[name].slot == slot
        cores[-1].on_death()  # it keeps its own when it starts again
        await anyio.sleep(5)
        assert machine.specs["engine-5"].slot == 3


URLS = ("http://one:1", "http://two:2")


async def test_added_http_replica_takes_the_url_of_the_one_that_was_removed(
    cores: list[Any],
) -> None:
    machine = Machine()
    config = RolloutConfig(engine=HttpEngine(urls=URLS), placement=InProcessPlacement())
    async with open_engines(config, placement=machine) as pool:
        with pytest.raises(EngineError) as caught:
            await pool.add_replica()
        assert str(caught.value) == (
            "engine.urls names 2 servers, and each has a replica; none is left"
        )
        for removed, url in (("engine-0", URLS[0]), ("engine-1", URLS[1])):
            await pool.remove_replica(removed)
            added = await pool.add_replica()
            assert machine.specs[added].options["url"] == url
        assert (await ask(pool, 1)).count == 1


async def test_runtime_none_starts_again_its_batch_fails_with_the_reasons_and_the_next_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = Scenario(seed=3, timing={"base_s": 0.1}).reply("", filler=100)
    simulated = scenario.config().engine
    assert isinstance(simulated, SimulatedEngine)
    engine = CustomEngine(
        core="faulty_cores:StubbornSimulation",
        options=dict(simulated.scenario),
        replicas=2,
        start_timeout_s=PATIENCE_S,
    )
    recorder = Recorder()
    prompt = Prompt(messages=[{"role": "user", "content": "hello"}], uid="p")
    config = scenario.config(engine=engine, placement=InProcessPlacement())
    async with recorder.open_rollout(config) as runtime:
        async with anyio.create_task_group() as tasks:

            async def kill() -> None:
                await anyio.sleep(2)
                refusal = "no room on the card"
                monkeypatch.setattr(faulty_cores.StubbornSimulation, "refusal", refusal)
                for alive in recorder.engines_alive():
                    alive.kill()
                await anyio.sleep(PATIENCE_S / 2)
                lines = runtime.explain().replicas
                for name, line in zip(("engine-0", "engine-1"), lines, strict=True):
                    assert line.startswith(f"{name}: restarting, 0 in flight")
                    assert line.endswith(f"last error: {name}: MemoryError: {refusal}")

            tasks.start_soon(kill)
            batch = await runtime.generate([prompt], samples=4)
            assert anyio.current_time() == pytest.approx(2 + PATIENCE_S)
        for trajectory in batch.trajectories:
            assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "no_engine")
            assert trajectory.cause is not None
            assert "engine-0: MemoryError: no room on the card" in trajectory.cause.message
            assert "engine-1: MemoryError: no room on the card" in trajectory.cause.message
            assert trajectory.transcript.generated_length > 0
        monkeypatch.undo()
        await anyio.sleep(60)
        batch = await runtime.generate([prompt], samples=4)
    assert {each.outcome for each in batch.trajectories} == {Outcome.COMPLETED}
