"""Many answers that arrive together: other tasks, timers and sockets get their turn meanwhile."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
from trio.testing import MockClock

from fake_core import CountingCore
from rollout.engine.core import Chunk, GenerationRequest
from rollout.engine.driver.lasting_connection import FRAMES_A_ROUND
from rollout.engine.wire import frames
from rollout.engine.channel.messages import ChannelSettings
from rollout.scopes import open_task_group
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
        await pending[number][1].done.wait()
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
    assert rounds.most <= 2 * FRAMES_A_ROUND


async def test_answers_wait_for_their_round_the_engine_is_heard_and_answers_commands(
    clock: MockClock,
) -> None:
    wire = Wire(AtOnce(2000))
    took: list[float] = []
    async with wire.channel(ChannelSettings(heartbeat_s=0.05, heartbeat_timeout_s=0.2)) as channel:

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
    assert len(took) > 10
    assert max(took) < 0.3


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
