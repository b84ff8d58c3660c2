"""Leftovers: what was pulled and not used is for the next call, whatever its source is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from test_carry_over import CARRY, config
from test_groups import Counted, uids, user

import rollout
from rollout import GroupPolicy, Prompt
from rollout.config import SchedulingConfig
from rollout.errors import SourceEnded

pytestmark = pytest.mark.anyio

ALL = GroupPolicy(oversample=1.0)


def of_step(step: int, texts: str) -> list[Prompt]:
    """Prompts of one step; an "s" is a slow one."""
    said = {"s": "slow", "g": "go"}
    return [user(said[each], uid=f"{step}.{at}") for at, each in enumerate(texts)]


class Told(Sequence[Prompt]):
    """A list that says how many of its prompts were pulled."""

    def __init__(self, count: int) -> None:
        self.pulled = 0
        self._prompts = of_step(0, "g" * count)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        self.pulled = max(self.pulled, index + 1)
        return self._prompts[index]


async def test_list_of_each_step_that_was_pulled_to_its_end_carries_into_the_next_call() -> None:
    policy = GroupPolicy(surplus="carry", oversample=1.5)
    # Six in the first step; then as many as a call starts beside the two that were carried.
    given = [of_step(*each) for each in enumerate(["sggsgg", "gggg", "ggss"])]
    taken = []
    async with rollout.open_rollout(config()) as runtime:
        for step, prompts in enumerate(given):
            batch = await runtime.collect(prompts, 4, policy=policy, step=step)
            taken.append(uids(batch)[::2])
            assert runtime.statistics().carried == 4
        rest = await runtime.collect([], 2, policy=ALL, step=3)
        statistics = runtime.statistics()
    assert taken == [
        ["0.1", "0.2", "0.4", "0.5"],
        ["1.0", "1.1", "1.2", "1.3"],
        ["0.0", "0.3", "2.0", "2.1"],
    ]
    assert uids(rest)[::2] == ["2.2", "2.3"]
    assert statistics.outcomes == {"completed": 28}
    assert statistics.admitted == 28


async def test_list_whose_last_prompt_is_pulled_as_its_call_is_left_gives_it_to_the_next_call() -> (
    None
):
    scheduling = SchedulingConfig(samples_per_prompt=2, max_in_flight=2)
    pulled = []
    for rounds in range(6):
        source = Told(2)
        async with rollout.open_rollout(config(scheduling=scheduling)) as runtime:
            async with runtime.stream_groups(source) as groups:
                assert (await anext(groups)).uid == "0.0"
                for _ in range(rounds):
                    await anyio.lowlevel.checkpoint()
            pulled.append(source.pulled)
            batch = await runtime.collect([user("go", uid="other")], 1)
            assert uids(batch)[::2] == ["0.1" if source.pulled == 2 else "other"]
    assert 2 in pulled


async def test_second_carried_group_of_a_uid_outlives_the_end_of_the_next_list() -> None:
    async with rollout.open_rollout(config()) as runtime:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                own = [user("slow", uid="x"), user("go", uid="y")]
                tasks.start_soon(runtime.collect, own, 1)
        assert runtime.statistics().carried == 4
        source = [user("go", uid="v")]
        with pytest.raises(SourceEnded, match="the source ended: 2 of 3 groups") as caught:
            await runtime.collect(source, 3, policy=ALL)
        assert uids(caught.value.partial)[::2] == ["x", "v"]
        assert runtime.statistics().carried == 2
        batch = await runtime.collect([user("go", uid="other")], 2, policy=ALL)
        assert uids(batch)[::2] == ["x", "other"]
        again = await runtime.collect(source, 1, policy=ALL)  # from its start
        assert uids(again)[::2] == ["v"]


async def test_iterable_that_ends_after_its_call_leaves_what_was_carried_to_the_next_call() -> None:
    async def two() -> AsyncIterator[Prompt]:
        for prompt in of_step(0, "sg"):
            yield prompt
        await anyio.sleep(10.0)

    async with rollout.open_rollout(config()) as runtime:
        async with runtime.stream_groups(two(), policy=CARRY) as groups:
            assert (await anext(groups)).uid == "0.1"
        batch = await runtime.collect([user("go", uid="other")], 1, policy=ALL)
        assert uids(batch)[::2] == ["0.0"]


async def test_prompts_of_a_list_that_has_ended_are_of_the_call_that_has_it() -> None:
    for places in range(2, 9):
        scheduling = SchedulingConfig(samples_per_prompt=2, max_in_flight=places)
        async with rollout.open_rollout(config(scheduling=scheduling)) as runtime:
            other = Counted()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(runtime.collect, other, 6)
                for _ in range(4):
                    batch = await runtime.collect(of_step(0, "ggg"), 3)
                    assert uids(batch)[::2] == ["0.0", "0.1", "0.2"]
