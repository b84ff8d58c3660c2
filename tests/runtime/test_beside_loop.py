"""What may take long is done in threads beside the event loop, but in virtual time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest
import torch

import rollout
import rollout.batch
from rollout import Prompt, TensorWeights
from rollout.config import SchedulingConfig
from rollout.engine.pool import weight_update
from rollout.errors import LimitExceeded, PromptError
from rollout.testing import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
async def test_generate_partial_batch_of_an_error_is_collated_beside_the_loop(
    collating: Threads,
) -> None:
    config = SCENARIO.config(scheduling=SchedulingConfig(max_failures=0, max_failure_share=0.0))
    given = [*prompts(3), *prompts(1, agent_name="beside_loop_broken")]
    async with rollout.open_rollout(config) as runtime:
        with pytest.raises(LimitExceeded) as caught:
            await runtime.generate(given, layout="packed")
    assert caught.value.partial is not None
    assert caught.value.partial.tensors["responses"].is_nested
    assert threading.get_ident() not in collating.seen


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


@REAL_TIME
@pytest.mark.usefixtures("few_are_many")
async def test_generate_many_prompts_of_which_one_is_wrong_start_nothing_and_do_not_count() -> None:
    given: list[Any] = [*prompts(30), "hello"]
    async with rollout.open_rollout(SCENARIO.config()) as runtime:
        with pytest.raises(PromptError, match=r"^prompts\[30\]: expected a Prompt, got str; "):
            await runtime.generate(given)
        assert runtime.statistics().admitted == 0
        batch = await runtime.generate(prompts(30))
        assert batch.samples[0].session_id.startswith("0/")


@REAL_TIME
async def test_update_weights_those_before_are_removed_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    removing = Threads(weight_update.unstage)
    monkeypatch.setattr(weight_update, "unstage", removing)
    weights = TensorWeights({"w": torch.ones(1)}, directory=str(tmp_path))
    async with rollout.open_rollout(SCENARIO.config()) as runtime:
        await runtime.update_weights(version=1, source=weights)
        assert len(_inside(tmp_path)) == 1
        await runtime.update_weights(version=2, source=weights)
        assert len(_inside(tmp_path)) == 1
    assert _inside(tmp_path) == []
    assert len(removing.seen) == 2
    assert threading.get_ident() not in removing.seen


def _inside(directory: Path) -> list[Path]:
    return list(directory.iterdir())


@pytest.fixture(scope="module", autouse=True)
def _agents() -> None:
    @rollout.register_agent("beside_loop_broken")
    class _Broken(rollout.agents.AgentLoop):
        async def run(self, context: Any) -> None:
            raise RuntimeError("a bug")
