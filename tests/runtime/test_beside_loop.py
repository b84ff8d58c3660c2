"""What may take long is done in threads beside the event loop, but in virtual time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

import rollout
import rollout.batch
from rollout import Prompt
from rollout.testing import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio

REAL_TIME = pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
SCENARIO = Scenario(seed=1).reply("<long>", filler=600).reply("", "ok")


class Threads:
    """Notes which threads call a function, and passes the calls on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.seen: list[int] = []
        self._function = function

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.seen.append(threading.get_ident())
        return self._function(*args, **options)


@pytest.fixture
def collating(monkeypatch: pytest.MonkeyPatch) -> Threads:
    threads = Threads(rollout.batch.collate)
    monkeypatch.setattr(rollout.batch, "collate", threads)
    return threads


def prompts(count: int, text: str = "hello", **fields: Any) -> list[Prompt]:
    return [Prompt(messages=[{"role": "user", "content": text}], **fields) for _ in range(count)]


class Watched(list[Prompt]):
    """Notes which threads read it."""

    readers: set[int]

    def __iter__(self) -> Any:
        self.readers.add(threading.get_ident())
        return super().__iter__()


@REAL_TIME
async def test_generate_batch_is_collated_beside_the_loop(collating: Threads) -> None:
    async with rollout.open_rollout(SCENARIO.config()) as runtime:
        assert len(await runtime.generate(prompts(2))) == 2
        await runtime.generate(prompts(2), layout="packed")
    assert len(collating.seen) == 2
    assert threading.get_ident() not in collating.seen


async def test_generate_in_virtual_time_collates_on_the_loop(collating: Threads) -> None:
    async with rollout.open_rollout(SCENARIO.config()) as runtime:
        await runtime.generate(prompts(4))
    assert collating.seen == [threading.get_ident()]


@REAL_TIME
async def test_generate_cancelled_while_it_collates_waits_for_that_and_leaves_the_runtime_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collates, may_end = threading.Event(), threading.Event()
    real = rollout.batch.collate

    def slow(*args: Any, **options: Any) -> Any:
        collates.set()
        assert may_end.wait(30)
        return real(*args, **options)

    monkeypatch.setattr(rollout.batch, "collate", slow)
    async with rollout.open_rollout(SCENARIO.config()) as runtime:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(runtime.generate, prompts(4))
                await anyio.to_thread.run_sync(collates.wait, 30)
                scope.cancel()
                may_end.set()
        assert len(await runtime.generate(prompts(4))) == 4


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 20 prompts take as long as more than 500 would."""
    monkeypatch.setattr("rollout.runtime.runtime.MANY_MEMBERS", 20)


@REAL_TIME
@pytest.mark.usefixtures("few_are_many")
async def test_generate_many_prompts_are_checked_beside_the_loop() -> None:
    many, few = Watched(prompts(30)), Watched(prompts(6))
    many.readers, few.readers = set(), set()
    async with rollout.open_rollout(SCENARIO.config()) as runtime:
        await runtime.generate(many)
        async with runtime.stream(many) as trajectories:
            await trajectories.receive()
        await runtime.generate(few)
    assert threading.get_ident() not in many.readers
    assert few.readers == {threading.get_ident()}
