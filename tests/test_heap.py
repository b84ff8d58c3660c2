"""Full garbage collections leave alone what lived before the runtime, and batches that run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import anyio
import pytest

import rollout
from rollout import Prompt, process_memory
from rollout.agents import AgentContext, AgentLoop
from rollout.config import SchedulingConfig
from rollout.lazy import importing
from rollout.runtime.heap import NEVER, YOUNG, freeze_loaded, frozen_heap
from rollout.testing import Scenario

SILENT = Scenario(seed=1).reply("", "ok")
PYTHONS = (700, 10, 10)
PUT_OFF = (YOUNG, NEVER, NEVER)


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    before = gc.get_threshold()
    gc.set_threshold(*PYTHONS)
    yield
    gc.enable()
    gc.set_threshold(*before)
    assert gc.get_freeze_count() == 0


def test_frozen_heap_keeps_what_lives_and_gives_it_back() -> None:
    old = Knot()
    old_gone = weakref.ref(old)
    with frozen_heap():
        young = Knot()
        young_gone = weakref.ref(young)
        del old, young
        gc.collect()
        assert young_gone() is None
        assert old_gone() is not None
    gc.collect()
    assert old_gone() is None


def test_frozen_heap_lasts_until_the_last_block_is_left() -> None:
    with frozen_heap():
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 0


def test_frozen_heap_leaves_a_heap_alone_that_the_caller_has_frozen() -> None:
    gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_frozen_heap_with_the_collector_disabled_does_nothing() -> None:
    gc.disable()
    try:
        with frozen_heap():
            assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_freeze_loaded_freezes_what_has_come_since_within_a_block_only() -> None:
    freeze_loaded()
    assert gc.get_freeze_count() == 0
    with frozen_heap():
        before = gc.get_freeze_count()
        knots = [Knot() for _ in range(1000)]
        freeze_loaded()
        assert gc.get_freeze_count() >= before + len(knots)
        with frozen_heap():  # another runtime's batches are alive: they end without it
            knots += [Knot() for _ in range(1000)]
            count = gc.get_freeze_count()
            freeze_loaded()
            assert gc.get_freeze_count() == count


def test_frozen_heap_is_frozen_while_the_collector_pauses_for_imports() -> None:
    with importing, frozen_heap():
        assert gc.get_freeze_count() > 0


@pytest.mark.anyio
@pytest.mark.parametrize("is_frozen", [True, False])
async def test_runtime_freezes_while_it_is_open_unless_told_not_to(is_frozen: bool) -> None:
    config = SILENT.config(scheduling=SchedulingConfig(freeze_heap=is_frozen))
    async with rollout.open_rollout(config):
        assert (gc.get_freeze_count() > 0) == is_frozen


# While batches run

#: What agents of `heap_probe` do in the middle of their trajectories.
_acts: list[Callable[[], None]] = []


@pytest.fixture(scope="module", autouse=True)
def _agents() -> None:
    @rollout.register_agent("heap_probe")
    class _Probe(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            await context.generate()
            for act in _acts:
                act()

    @rollout.register_agent("heap_waiting")
    class _Waiting(AgentLoop):
        """Leaves a knot behind, and ends when somebody has found it."""

        async def run(self, context: AgentContext) -> None:
            knot = Knot()
            gone = weakref.ref(knot)
            gc.collect(0)  # it is not among the youngest any more, which any thread may look at
            del knot
            while gone() is not None:
                await anyio.sleep(0.01)
            await context.generate()

    @rollout.register_agent("heap_churning")
    class _Churning(AgentLoop):
        """Replaces as many old objects as it makes, and ends when those have grown older."""

        async def run(self, context: AgentContext) -> None:
            kept: list[list[int]] = [[] for _ in range(50_000)]
            gc.collect(0)
            for at in range(len(kept)):
                kept[at] = []
            while len(gc.get_objects(generation=0)) > len(kept) // 2:
                await anyio.sleep(0.01)
            await context.generate()


@pytest.fixture
def seen() -> Iterator[list[tuple[int, int, int]]]:
    """The thresholds in the middle of each trajectory."""
    thresholds: list[tuple[int, int, int]] = []
    _acts.append(lambda: thresholds.append(gc.get_threshold()))
    yield thresholds
    _acts.clear()


def probes(count: int = 2) -> list[Prompt]:
    message = {"role": "user", "content": "hello"}
    return [Prompt(messages=[message], agent_name="heap_probe") for _ in range(count)]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
async def test_batch_runs_without_full_collections_and_gives_the_thresholds_back(
    seen: list[tuple[int, int, int]],
) -> None:
    full: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(phase)

    kept: list[list[int]] = []
    _acts.append(lambda: kept.extend([] for _ in range(200_000)))
    async with rollout.open_rollout(SILENT.config()) as runtime:
        assert gc.get_threshold() == PYTHONS
        gc.callbacks.append(note)
        await runtime.generate(probes())
        gc.callbacks.remove(note)
        assert gc.get_threshold() == PYTHONS
        async with runtime.stream(probes()) as trajectories:
            async for _ in trajectories:
                pass
        assert gc.get_threshold() == PYTHONS
    assert seen == [PUT_OFF] * 4
    assert full == []


@pytest.mark.anyio
async def test_batch_that_begins_while_the_collector_pauses_for_imports_is_no_exception(
    seen: list[tuple[int, int, int]],
) -> None:
    async with rollout.open_rollout(SILENT.config()) as runtime:
        with importing:
            async with runtime.stream(probes()) as trajectories:
                async for _ in trajectories:
                    pass
    assert seen == [PUT_OFF] * 2
    assert gc.get_threshold() == PYTHONS
    assert gc.isenabled()


@pytest.mark.anyio
async def test_batches_at_once_of_two_runtimes_give_the_thresholds_back_with_the_last(
    seen: list[tuple[int, int, int]],
) -> None:
    slow = SILENT.timing(base_s=5.0)
    left: list[tuple[int, int, int]] = []
    async with (
        rollout.open_rollout(SILENT.config()) as one,
        rollout.open_rollout(slow.config()) as other,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(other.generate, probes())
        await one.generate(probes())
        left.append(gc.get_threshold())
        await one.generate(probes())
        left.append(gc.get_threshold())
    assert left == [PUT_OFF, PUT_OFF]
    assert seen == [PUT_OFF] * 6
    assert gc.get_threshold() == PYTHONS


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["cancelled", "failed", "stream that is left"])
async def test_batch_that_does_not_end_well_gives_the_thresholds_back(how: str) -> None:
    config = SILENT.timing(base_s=5.0).config(
        scheduling=SchedulingConfig(max_failures=0, max_failure_share=0.0)
    )
    if how == "failed":
        _acts.append(lambda: 1 / 0)
    async with rollout.open_rollout(config) as runtime:
        if how == "cancelled":
            with anyio.move_on_after(1.0):
                await runtime.generate(probes())
        elif how == "failed":
            with pytest.raises(rollout.LimitExceeded):
                await runtime.generate(probes())
        else:
            async with runtime.stream(probes()):
                await anyio.sleep(1.0)
        assert gc.get_threshold() == PYTHONS
    _acts.clear()


@pytest.mark.anyio
async def test_batch_leaves_thresholds_of_the_caller_alone(
    seen: list[tuple[int, int, int]],
) -> None:
    gc.set_threshold(5000, 20, 30)
    async with rollout.open_rollout(SILENT.config()) as runtime:
        await runtime.generate(probes())
        assert seen == [(5000, 20, 30)] * 2
        assert gc.get_threshold() == (5000, 20, 30)
        gc.set_threshold(*PYTHONS)
        _acts.append(lambda: gc.set_threshold(900, 9, 9))
        await runtime.generate(probes(1))
        assert gc.get_threshold() == (900, 9, 9)


@pytest.mark.anyio
async def test_batch_leaves_a_disabled_collector_alone(seen: list[tuple[int, int, int]]) -> None:
    gc.disable()
    async with rollout.open_rollout(SILENT.config()) as runtime:
        _acts.append(lambda: seen.append((int(gc.isenabled()), 0, 0)))
        await runtime.generate(probes(1))
    assert seen == [PYTHONS, (0, 0, 0)]
    assert not gc.isenabled()


@pytest.mark.anyio
async def test_batch_told_not_to_freeze_leaves_the_collector_alone(
    seen: list[tuple[int, int, int]],
) -> None:
    config = SILENT.config(scheduling=SchedulingConfig(freeze_heap=False))
    async with rollout.open_rollout(config) as runtime:
        await runtime.generate(probes())
    assert seen == [PYTHONS] * 2


@pytest.mark.anyio
async def test_batch_knot_of_an_agent_is_found_by_itself_after_the_batch() -> None:
    gone: list[weakref.ref[Knot]] = []

    def leak() -> None:
        knot = Knot()
        gone.append(weakref.ref(knot))
        gc.collect(0)  # it is not among the youngest any more when it becomes garbage

    _acts.append(leak)
    async with rollout.open_rollout(SILENT.config()) as runtime:
        await runtime.generate(probes())
        _acts.clear()
        assert all(knot() for knot in gone)
        lists: list[list[int]] = []
        while any(knot() for knot in gone) and len(lists) < 1_000_000:
            lists.append([])
        assert not any(knot() for knot in gone)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])  # in real time
async def test_batch_knot_of_an_agent_is_found_while_it_runs_once_memory_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = iter([0, *range(0, 1 << 40, 1 << 30)])  # a GiB more at each look
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: next(used))
    monkeypatch.setattr(process_memory, "available_bytes", lambda: 12 << 30)
    prompt = Prompt(messages=[{"role": "user", "content": "hello"}], agent_name="heap_waiting")
    async with rollout.open_rollout(SILENT.config()) as runtime:
        with anyio.fail_after(60):
            batch = await runtime.generate([prompt])
    assert batch.samples[0].outcome == "completed"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])  # in real time
async def test_batch_objects_go_as_others_come_the_youngest_are_looked_at_while_few() -> None:
    prompt = Prompt(messages=[{"role": "user", "content": "hello"}], agent_name="heap_churning")
    async with rollout.open_rollout(SILENT.config()) as runtime:
        with anyio.fail_after(20):
            batch = await runtime.generate([prompt])
    assert batch.samples[0].outcome == "completed"


def test_process_memory_is_known_here() -> None:
    assert 1 << 20 < process_memory.resident_bytes() < 1 << 40
    assert 0 < process_memory.available_bytes() < 1 << 50


def test_heap_frozen_again_and_again_cycles_left_between_are_found() -> None:
    class Node:
        pass

    seen: list[weakref.ref[Node]] = []
    for _ in range(40):
        with frozen_heap():
            nodes = [Node() for _ in range(20_000)]
            for node in nodes:
                node.own = node  # type: ignore[attr-defined]
            seen.append(weakref.ref(nodes[0]))
            gc.freeze()  # as a runtime does that is open: no collection looks at them any more
            del nodes, node
    assert sum(each() is not None for each in seen) < len(seen)
    gc.collect()


@pytest.mark.anyio
async def test_threshold_that_a_caller_sets_while_batches_run_stays_alone(
    seen: list[tuple[int, int, int]],
) -> None:
    _acts.append(lambda: gc.set_threshold(5000))
    async with rollout.open_rollout(SILENT.config()) as runtime:
        await runtime.generate(probes(1))
    assert gc.get_threshold() == (5000, *PYTHONS[1:])


@pytest.mark.anyio
async def test_thresholds_of_a_batch_that_a_caller_puts_back_after_it_are_not_its_own() -> None:
    async with rollout.open_rollout(SILENT.config()) as runtime:
        read: list[tuple[int, int, int]] = []
        _acts.append(lambda: read.append(gc.get_threshold()))
        await runtime.generate(probes(1))
        gc.set_threshold(*read[0])
        await runtime.generate(probes(1))
    assert gc.get_threshold() == PYTHONS
    gc.set_threshold(*PYTHONS)
