"""Many tasks woken together: no round of the loop runs more of them than fit into its time."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import trio
from trio.testing import MockClock

import rollout
from fake_core import CountingCore
from rollout import Outcome, Prompt
from rollout.config import LimitsConfig, SchedulingConfig
from rollout.engine.core import Chunk, GenerationRequest
from rollout.engine.wire import frames
from rollout.engine.wire.protocol import Terms
from rollout.scopes import open_task_group
from rollout.testing import Scenario, run_virtual
from rollout.wake_budget import FIRST_WAKES, MOST_WAKES, ROUND_S, WakeBudget
from wires import Asker, Wire

pytestmark = pytest.mark.anyio

BACKENDS = pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
#: What a woken task costs, where a test's clock is to say so.
WORK_S = 0.001


@pytest.fixture
def clock() -> MockClock:
    """Virtual time that woken tasks may take."""
    return MockClock(autojump_threshold=0)


@pytest.fixture
def anyio_backend(clock: MockClock) -> object:
    """Virtual time, where a test does not name the backends."""
    return ("trio", {"clock": clock})


class Rounds:
    """Counts rounds of the loop, and in how many of them something happened how often."""

    def __init__(self) -> None:
        self.number = 0
        self.seen: Counter[int] = Counter()

    def note(self) -> None:
        """It happened."""
        self.seen[self.number] += 1

    @property
    def most(self) -> int:
        """How often at most in one round; trio's order may let two of them look like one."""
        return max(self.seen.values())

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Within the block; virtual time stands still there."""
        async with open_task_group() as tasks:
            tasks.start_soon(self._count)
            yield

    async def _count(self) -> None:
        while True:
            self.number += 1
            await anyio.lowlevel.checkpoint()


class Steps(trio.abc.Instrument):
    """Counts the steps of tasks in each round of trio's loop, but for those of engines.

    Those live on this loop here, and as a rule in a process of their own.
    """

    def __init__(self) -> None:
        self.most = 0
        self._count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """See `trio.abc.Instrument`."""
        self._count += not task.name.startswith("rollout.engine.process.")

    def before_io_wait(self, timeout: float) -> None:
        """See `trio.abc.Instrument`."""
        self.most, self._count = max(self.most, self._count), 0


@asynccontextmanager
async def most_steps() -> AsyncIterator[Steps]:
    """The steps of rounds within the block."""
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    try:
        yield steps
    finally:
        trio.lowlevel.remove_instrument(steps)


# --- the budget


@BACKENDS
@pytest.mark.parametrize("is_burst", [True, False])
async def test_budget_many_ask_few_get_their_turn_in_a_round(is_burst: bool) -> None:
    wakes, rounds, order = WakeBudget(), Rounds(), []

    async def one(number: int) -> None:
        await wakes.take()
        rounds.note()
        order.append(number)

    async with rounds.counted(), anyio.create_task_group() as tasks:
        for number in range(500):
            tasks.start_soon(one, number)
            if not is_burst:
                await anyio.lowlevel.checkpoint()
    assert sorted(order) == list(range(500))
    assert rounds.most <= 2 * MOST_WAKES
    if not is_burst:  # in their order, but for those of one round
        assert all(abs(number - at) <= MOST_WAKES for at, number in enumerate(order))


@BACKENDS
async def test_budget_one_that_waits_is_cancelled_the_others_get_their_turns() -> None:
    wakes, ended = WakeBudget(), 0
    wakes.spend(FIRST_WAKES)

    async def one(scope: anyio.CancelScope) -> None:
        nonlocal ended
        with scope:
            await wakes.take()
        ended += 1

    scopes = [anyio.CancelScope() for _ in range(200)]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for scope in scopes:
                tasks.start_soon(one, scope)
            for number in (0, 1, 2, 3, 60, 100):  # the first of them is to renew the budget
                await anyio.lowlevel.checkpoint()
                scopes[number].cancel()
                scopes[number + 1].cancel()
    assert ended == 200


async def test_budget_costly_wake_ups_fewer_of_them_in_a_round(clock: MockClock) -> None:
    wakes, rounds = WakeBudget(), Rounds()

    async def one() -> None:
        await wakes.take()
        rounds.note()
        clock.jump(WORK_S)

    async with rounds.counted(), anyio.create_task_group() as tasks:
        for _ in range(400):
            tasks.start_soon(one)
    late = [count for number, count in rounds.seen.items() if number > 20]
    assert max(late) <= 2 * ROUND_S / WORK_S
    assert sum(late) / len(late) > 0.5 * ROUND_S / WORK_S


async def rounds_of_takes(count: int) -> list[int]:
    wakes, rounds = WakeBudget(), Rounds()
    async with rounds.counted():
        for _ in range(count):
            await wakes.take()
            rounds.note()
    return list(rounds.seen.values())


def test_budget_nothing_costs_anything_in_virtual_time_rounds_are_the_same_each_time() -> None:
    first, second = (run_virtual(rounds_of_takes, 1000, seed=1) for _ in range(2))
    assert first == second
    assert max(first) <= 2 * MOST_WAKES


# --- answers


class AtOnce(CountingCore):
    """Answers when so many requests are there, and then all of them."""

    def __init__(self, count: int) -> None:
        super().__init__(max_requests=1 << 16)
        self._missing = count
        self._complete = anyio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Four tokens."""
        self._missing -= 1
        if self._missing <= 0:
            self._complete.set()
        await self._complete.wait()
        yield Chunk(
            request_id=request.request_id,
            ids=array("i", range(4)).tobytes(),
            log_probs=array("f", range(4)).tobytes(),
            finish_reason="length",
        )


async def ask_all(asker: Asker, count: int, woken: Callable[[], object]) -> None:
    """So many requests side by side; `woken` is called in each task when its answer has come."""
    pending = [asker.submit([number], session=f"{number}") for number in range(count)]

    async def wait(number: int) -> None:
        await pending[number][1].done
        assert list(pending[number][0].ids) == [0, 1, 2, 3]
        woken()

    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(wait, number)


@BACKENDS
async def test_answers_of_one_read_few_tasks_are_woken_in_a_round() -> None:
    wire, rounds = Wire(AtOnce(500)), Rounds()
    async with wire.channel() as channel, rounds.counted():
        await ask_all(Asker(channel), 500, rounds.note)
    assert rounds.seen.total() == 500
    assert rounds.most <= 2 * MOST_WAKES


async def test_answers_of_one_read_a_timer_is_not_late_for_all_of_them(clock: MockClock) -> None:
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = anyio.current_time() + 0.005
            await anyio.sleep_until(due)
            late.append(anyio.current_time() - due)

    wire = Wire(AtOnce(300))
    async with wire.channel() as channel, open_task_group() as tasks:
        tasks.start_soon(tick)
        await ask_all(Asker(channel), 300, lambda: clock.jump(WORK_S))
    assert 0.3 < anyio.current_time() < 0.5
    assert max(late) <= 2 * FIRST_WAKES * WORK_S


async def test_answers_of_two_replicas_are_woken_in_turns(clock: MockClock) -> None:
    order: list[str] = []

    def woken(name: str) -> Callable[[], None]:
        def note() -> None:
            clock.jump(WORK_S)
            order.append(name)

        return note

    wakes = WakeBudget()
    busy, idle = Wire(AtOnce(300), wakes=wakes), Wire(AtOnce(20), wakes=wakes)
    async with busy.channel() as first, idle.channel() as second:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_all, Asker(first), 300, woken("busy"))
            tasks.start_soon(ask_all, Asker(second), 20, woken("idle"))
    last = max(at for at, name in enumerate(order) if name == "idle")
    assert order[:last].count("busy") <= 60


async def test_answers_wait_for_their_round_the_engine_is_heard_and_answers_commands(
    clock: MockClock,
) -> None:
    wire = Wire(AtOnce(2000))
    took: list[float] = []
    async with wire.channel(Terms(heartbeat_s=0.05, heartbeat_timeout_s=0.2)) as channel:

        async def beat() -> None:
            while True:
                began, heard = anyio.current_time(), channel.load
                while channel.load is heard:
                    await anyio.sleep(0.005)
                took.append(anyio.current_time() - began)

        async with open_task_group() as tasks:
            tasks.start_soon(beat)
            await ask_all(Asker(channel), 2000, lambda: clock.jump(WORK_S))
        assert anyio.current_time() > 1.9
        assert not channel.lost.is_set()
    assert len(took) > 20
    assert max(took) < 0.1


async def test_answers_wait_for_their_round_nothing_more_is_read_meanwhile(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "READ_BYTES", 2000)
    wire, ahead = Wire(AtOnce(1000)), []
    async with wire.channel() as channel:

        def woken() -> None:
            clock.jump(WORK_S)
            ahead.append(channel._data.received - channel.tokens.taken * 20)

        await ask_all(Asker(channel), 1000, woken)
    # An answer of four tokens has more than 20 bytes for each of them, so that this overestimates
    # what is delivered, and only the difference of what is read before it counts.
    size = (ahead[-1] + 1000 * 80) / 1000
    read_ahead = [
        each + (number + 1) * 80 - (number + 1) * size for number, each in enumerate(ahead)
    ]
    assert max(read_ahead) < 2 * 2000 + size


async def test_answers_wait_for_their_round_connection_is_cut_none_is_lost(
    clock: MockClock,
) -> None:
    wire, count = Wire(AtOnce(300)), 0
    async with wire.channel() as channel:

        def woken() -> None:
            nonlocal count
            count += 1
            clock.jump(WORK_S)
            if count == 20:
                wire.cut()

        await ask_all(Asker(channel), 300, woken)
        assert count == 300
        assert (channel.in_flight, channel.tokens.taken) == (0, 1200)
        assert channel.tokens.arrived == 1200


# --- batches

MANY = 300
SLOW = Scenario(seed=1).reply("", filler=5000).timing(base_s=1.0, prefill_tokens_per_s=None)
#: Steps in a round: a few tasks serve the engine and the channel, and those that wait for members
#: are woken with them.
FEW_STEPS = 3 * MOST_WAKES + 20


def prompts(count: int = MANY) -> list[Prompt]:
    return [Prompt(messages=[{"role": "user", "content": "go"}], uid=f"{n}") for n in range(count)]


@pytest.mark.slow
async def test_members_started_at_once_few_steps_in_a_round() -> None:
    config = SLOW.config(scheduling=SchedulingConfig(max_in_flight=MANY))
    async with rollout.open_rollout(config) as runtime, open_task_group() as tasks:
        async with most_steps() as steps:
            tasks.start_soon(runtime.generate, prompts())
            await anyio.sleep(0.5)
    assert steps.most < FEW_STEPS


@pytest.mark.parametrize("how", ["runtime.cancel", "scope", "stream", "close"])
async def test_members_cancelled_at_once_few_steps_in_a_round(how: str) -> None:
    config = SLOW.config(scheduling=SchedulingConfig(max_in_flight=MANY))
    scope = anyio.CancelScope()
    async with rollout.open_rollout(config) as runtime, open_task_group() as tasks:

        async def call() -> None:
            with scope:
                if how != "stream":
                    await runtime.generate(prompts())
                    return
                async with runtime.stream(prompts()):
                    await leave.wait()

        leave = anyio.Event()
        tasks.start_soon(call)
        await anyio.sleep(5.5)
        assert runtime.statistics().running == MANY
        async with most_steps() as steps:
            if how == "runtime.cancel":
                assert runtime.cancel() == MANY
            elif how == "scope":
                scope.cancel()
            elif how == "stream":
                leave.set()
            else:
                for run in tuple(runtime._calls):
                    run.cancel(None, None, "closed")
            await anyio.sleep(1.0)
        statistics = runtime.statistics()
        assert (statistics.running, statistics.zombies) == (0, 0)
        assert statistics.outcomes == {"cancelled": MANY}
        assert statistics.generated_tokens >= 5 * MANY
    assert steps.most < FEW_STEPS


async def test_members_meet_the_deadline_at_once_few_steps_in_a_round() -> None:
    config = SLOW.config(
        scheduling=SchedulingConfig(max_in_flight=MANY),
        limits=LimitsConfig(batch_s=5.5, trajectory_s=5.5, turn_s=5.5, generation_s=5.5, tool_s=5),
    )
    async with rollout.open_rollout(config) as runtime, most_steps() as steps:
        batch = await runtime.generate(prompts())
        assert 5.5 <= anyio.current_time() < 6.6  # an engine answers between two of its steps
    assert {t.outcome for t in batch.trajectories} == {Outcome.DEADLINE}
    assert {t.limit_source for t in batch.trajectories} == {"limits.batch_s"}
    assert steps.most < FEW_STEPS


async def test_members_never_started_end_at_once_timers_get_their_turn(clock: MockClock) -> None:
    config = SLOW.config(scheduling=SchedulingConfig(max_in_flight=1))
    ended: Counter[int] = Counter()
    rounds = 0

    async def count() -> None:
        nonlocal rounds
        while ended.total() < 4999:  # the one that was started needs virtual time to end
            rounds += 1
            await anyio.lowlevel.checkpoint()

    async with rollout.open_rollout(config) as runtime, open_task_group() as tasks:

        async def run() -> None:
            async with runtime.stream(prompts(5000)) as trajectories:
                async for _ in trajectories:
                    ended.update([rounds])

        async with anyio.create_task_group() as calls:
            calls.start_soon(run)
            await anyio.sleep(1.5)
            tasks.start_soon(count)
            assert runtime.cancel() == 5000
    assert ended.total() == 5000
    assert max(ended.values()) <= 2 * 16 * MOST_WAKES


async def test_member_cancelled_while_others_wait_for_their_round_keeps_its_outcome() -> None:
    config = SLOW.config(scheduling=SchedulingConfig(max_in_flight=MANY))
    outcomes: list[Any] = []
    async with rollout.open_rollout(config) as runtime:
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                batch = await runtime.generate(prompts())
                outcomes.extend((t.outcome, t.reason) for t in batch.trajectories)

            tasks.start_soon(call)
            await anyio.sleep(3.5)
            assert runtime.cancel(reason="first") == MANY
            assert runtime.cancel(reason="second") == 0
    assert outcomes == [(Outcome.CANCELLED, "first")] * MANY


@BACKENDS
async def test_caller_cancelled_before_the_first_member_starts_none_does() -> None:
    config = Scenario(seed=1).reply("", "ok").config()
    async with rollout.open_rollout(config) as runtime:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await runtime.generate(prompts(20))
        statistics = runtime.statistics()
        assert scope.cancelled_caught
        assert (statistics.admitted, statistics.outcomes) == (20, {"cancelled": 20})
