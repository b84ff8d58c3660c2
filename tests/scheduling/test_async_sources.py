"""Async sources: what they open stays open between two prompts, and is closed where it was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
from test_group_sources import prompts, uids, user

import rollout
from rollout import GroupPolicy, Prompt
from rollout.config import AgentConfig, LimitsConfig, SchedulingConfig
from rollout.errors import SourceEnded
from rollout.testing import Scenario, run_virtual

pytestmark = pytest.mark.anyio

ALL = GroupPolicy(oversample=1.0)
CLEANUP_S = 0.25
#: Both on asyncio, where time is real, and on trio, where it is not.
SCENARIO = (
    Scenario(seed=1).reply("", filler=5).timing(base_s=0.001, slope_s=0.0, prefill_tokens_per_s=1e9)
)


def config() -> Any:
    return SCENARIO.config(
        agent=AgentConfig(name="single_turn"),
        limits=LimitsConfig(cleanup_s=CLEANUP_S),
        scheduling=SchedulingConfig(samples_per_prompt=1),
    )


class Prefetching:
    """A loader that yields within its own task group.

    Attributes:
        log: What became of it.
    """

    def __init__(self, count: int, fails_at: int = -1) -> None:
        self.log: list[str] = []
        self._count, self._fails_at = count, fails_at

    async def _fetch(self, send: Any) -> None:
        async with send:
            for at in range(self._count):
                if at == self._fails_at:
                    raise OSError("no such shard")
                await anyio.sleep(0.001)
                await send.send(user(f"p{at}"))

    async def prompts(self) -> AsyncIterator[Prompt]:
        send, receive = anyio.create_memory_object_stream[Prompt](2)
        task = anyio.get_current_task().id
        try:
            async with receive, anyio.create_task_group() as tasks:
                tasks.start_soon(self._fetch, send)
                try:
                    async for prompt in receive:
                        yield prompt
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(0.001)
                    is_same = anyio.get_current_task().id == task
                    self.log.append("closed" if is_same else "closed elsewhere")
                    tasks.cancel_scope.cancel()
        finally:
            self.log.append("left")


async def swallow_at_second_prompt() -> AsyncIterator[Prompt]:
    """Goes on whatever it is told."""
    yield user("p0")
    while True:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)


async def takes_all_of_a_prefetching_source() -> None:
    loader = Prefetching(7)
    async with rollout.open_rollout(config()) as runtime:
        source = loader.prompts()
        taken = [uids(await runtime.collect(source, 2, policy=ALL)) for _ in range(3)]
        assert taken == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]
        with pytest.raises(SourceEnded) as caught:
            await runtime.collect(source, 2, policy=ALL)
        assert uids(caught.value.partial) == ["p6"]
        assert uids(await runtime.generate([user("z")])) == ["z"]
    assert loader.log == ["closed", "left"]


async def closes_what_is_not_over_with_the_runtime() -> None:
    loader = Prefetching(100)
    source = loader.prompts()
    async with rollout.open_rollout(config()) as runtime:
        assert uids(await runtime.collect(source, 2, policy=ALL)) == ["p0", "p1"]
        assert loader.log == []
    assert loader.log == ["closed", "left"]


async def tells_what_a_task_of_the_source_raised() -> None:
    source = Prefetching(4, fails_at=2).prompts()
    async with rollout.open_rollout(config()) as runtime:
        assert uids(await runtime.collect(source, 1, policy=ALL)) == ["p0"]
        await anyio.sleep(0.05)  # it fails between two calls
        with pytest.raises(ExceptionGroup) as caught:
            await runtime.collect(source, 2, policy=ALL)
        assert caught.group_contains(OSError, match="no such shard")
        with pytest.raises(SourceEnded):
            await runtime.collect(source, 1, policy=ALL)
        assert uids(await runtime.collect(prompts(1), 1, policy=ALL)) == ["p0"]


async def keeps_its_place_when_a_call_is_cancelled() -> None:
    may_go = anyio.Event()

    async def late() -> AsyncIterator[Prompt]:
        with anyio.CancelScope():
            yield user("p0")
            await may_go.wait()
            yield user("p1")
            yield user("p2")

    source = late()
    async with rollout.open_rollout(config()) as runtime:
        with anyio.move_on_after(0.1) as scope:
            await runtime.collect(source, 3, policy=ALL)
        assert scope.cancelled_caught
        may_go.set()
        assert uids(await runtime.collect(source, 3, policy=ALL)) == ["p0", "p1", "p2"]


async def gives_up_what_swallows_its_cancellation() -> None:
    source = swallow_at_second_prompt()
    async with rollout.open_rollout(config()) as runtime:
        with anyio.move_on_after(0.1):
            await runtime.collect(source, 2, policy=ALL)
        began = anyio.current_time()
    assert 0.9 * CLEANUP_S < anyio.current_time() - began < CLEANUP_S + 1.0
    assert runtime.statistics().unresponsive == 1


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
@pytest.mark.parametrize(
    "situation",
    [
        takes_all_of_a_prefetching_source,
        closes_what_is_not_over_with_the_runtime,
        tells_what_a_task_of_the_source_raised,
        keeps_its_place_when_a_call_is_cancelled,
        gives_up_what_swallows_its_cancellation,
    ],
)
def test_async_source_keeps_what_it_has_open(
    situation: Callable[[], Awaitable[None]], backend: str
) -> None:
    run_virtual(situation) if backend == "trio" else anyio.run(situation, backend=backend)


async def test_stream_that_its_caller_has_is_not_closed_with_the_runtime() -> None:
    send, receive = anyio.create_memory_object_stream[Prompt](9)
    async with send, receive:
        for prompt in prompts(3):
            send.send_nowait(prompt)
        async with rollout.open_rollout(config()) as runtime:
            assert uids(await runtime.collect(receive, 2, policy=ALL)) == ["p0", "p1"]
        assert (await receive.receive()).uid == "p2"


async def test_source_that_cannot_be_closed_is_told_of_and_ends_nothing_else(caplog: Any) -> None:
    class Panic(BaseException):
        """As of a loader in another language."""

    async def broken() -> AsyncIterator[Prompt]:
        try:
            for prompt in prompts(9):
                yield prompt
        finally:
            raise Panic("cannot be closed")

    async with rollout.open_rollout(config()) as runtime:
        await runtime.collect(broken(), 1, policy=ALL)
        assert uids(await runtime.collect(prompts(1, "q"), 1, policy=ALL)) == ["q0"]
        await anyio.sleep(1)
        assert uids(await runtime.generate([user("z")])) == ["z"]
    assert "cannot be closed" in caplog.text
