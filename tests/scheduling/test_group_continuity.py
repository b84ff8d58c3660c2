"""Groups across calls: carried ones once, sources where they stood, also after a resumption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollout
from rollout import AgentContext, AgentLoop, GroupPolicy, Prompt, RolloutConfig, register_agent
from rollout.config import AgentConfig, JournalConfig, SchedulingConfig
from rollout.testing import Scenario, run_virtual


@register_agent("cleans_up_slowly")
class CleansUpSlowly(AgentLoop):
    """The surplus of p0 is slow to clean up; p1, which is carried, ends by itself meanwhile."""

    first_s = 0.0

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        if (context.identity.uid, context.identity.member) == ("p0", 0):
            await anyio.sleep(self.first_s)
        if (context.identity.uid, context.identity.member) == ("p0", 1):
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(4)
        if context.identity.uid == "p1":
            await anyio.sleep(2)
            if self.first_s:
                await context.generate()
                await anyio.sleep(10)
        if context.identity.uid == "q0":
            await anyio.sleep(1)


def prompt(number: int, name: str = "p") -> Prompt:
    return Prompt("x", uid=f"{name}{number}")


def source(name: str = "p") -> Iterator[Prompt]:
    yield from (prompt(number, name) for number in range(1000))


def config_of(
    agent: str = "single_turn", journal: Path | None = None, **scheduling: Any
) -> RolloutConfig:
    options: dict[str, Any] = {"samples_per_prompt": 1, "max_in_flight": 2, **scheduling}
    scenario = Scenario(seed=1).reply("", filler=30).timing(base_s=0.01)
    return scenario.config(
        agent=AgentConfig(name=agent),
        journal=JournalConfig(path=None if journal is None else str(journal)),
        scheduling=SchedulingConfig(**options),
    )


@register_agent("cleans_up_slowly_beside_another")
class CleansUpBesideAnother(CleansUpSlowly):
    """With a group that another call takes meanwhile."""

    first_s = 0.5


def uids(batch: Any) -> list[str]:
    return list(dict.fromkeys(each.uid for each in batch.trajectories))


SLOW = {
    "agent": "cleans_up_slowly",
    "samples_per_prompt": 2,
    "max_in_flight": 5,
    "groups": GroupPolicy(surplus="carry", oversample=2.0, members=1),
}


def test_carried_group_that_ends_while_its_call_cleans_up_is_given_once() -> None:
    async def act() -> None:
        prompts, plain = source(), GroupPolicy(oversample=1.0)
        async with rollout.open_rollout(config_of(**{**SLOW, "max_in_flight": 4})) as runtime:
            found = uids(await runtime.collect(prompts, 1))
            for _ in range(3):
                found += uids(await runtime.collect(prompts, 1, policy=plain))
        assert found == ["p0", "p1", "p2", "p3"]

    run_virtual(act)


def test_carried_group_that_another_call_takes_meanwhile_stays_with_that() -> None:
    async def act() -> None:
        refusing = GroupPolicy(oversample=1.0, accept=lambda group: group.uid != "q0")

        def questions() -> Iterator[Prompt]:
            yield prompt(0, "q")
            while True:
                yield prompt(1, "q")

        async def collect_beside() -> None:
            await anyio.sleep(0.05)
            with anyio.fail_after(1000):
                await runtime.collect(questions(), 1, policy=refusing)

        config = config_of(**{**SLOW, "agent": "cleans_up_slowly_beside_another"})
        async with rollout.open_rollout(config) as runtime:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(collect_beside)
                assert uids(await runtime.collect(source(), 1)) == ["p0"]

    run_virtual(act)


class Faulty:
    """Raises once, at the third of six."""

    def __init__(self) -> None:
        self._has_raised = False

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Prompt:
        if number == 2 and not self._has_raised:
            self._has_raised = True
            raise OSError("not now")
        if number >= 6:
            raise IndexError(number)
        return prompt(number)


def test_source_that_raises_once_goes_on_in_the_next_call() -> None:
    async def act() -> None:
        data = Faulty()
        async with rollout.open_rollout(config_of()) as runtime:
            assert uids(await runtime.collect(data, 2)) == ["p0", "p1"]
            with pytest.raises(OSError, match="not now"):
                await runtime.collect(data, 2)
            assert uids(await runtime.collect(data, 2)) == ["p2", "p3"]
            assert uids(await runtime.collect(data, 2)) == ["p4", "p5"]

    run_virtual(act)


def test_end_of_a_list_is_known_without_a_slot_and_one_that_grew_goes_on() -> None:
    async def act() -> None:
        async with rollout.open_rollout(config_of()) as runtime:
            with anyio.fail_after(100):
                async with runtime.stream_groups([prompt(0), prompt(1)]) as groups:
                    await anyio.sleep(0.05)
                    runtime.admission.pause()  # both run
                    assert [each.uid async for each in groups] == ["p0", "p1"]
            runtime.admission.resume()
            data = [prompt(number) for number in range(4)]
            assert uids(await runtime.collect(data, 2)) == ["p0", "p1"]
            data += [prompt(4), prompt(5)]
            assert uids(await runtime.collect(data, 2)) == ["p2", "p3"]
            assert uids(await runtime.collect(data, 2)) == ["p4", "p5"]

    run_virtual(act)


def test_resumed_stream_that_was_left_pulls_nothing_before_its_consumer_wants_more(
    tmp_path: Path,
) -> None:
    found: list[list[str]] = []

    async def act(steps: int) -> None:
        found.clear()
        prompts = source()
        config = config_of(journal=tmp_path / "journal")
        async with rollout.open_rollout(config, resume=True) as runtime:
            for step in range(steps):
                async with runtime.stream_groups(prompts, step=step) as groups:
                    found.append([(await anext(groups)).uid for _ in range(2)])
                await anyio.sleep(5)

    run_virtual(lambda: act(4))
    before = list(found)
    run_virtual(lambda: act(6))
    assert found[:4] == before
    # Those of one step end in the same moment.
    assert list(map(sorted, found[4:])) == [["p8", "p9"], ["p10", "p11"]]


def test_resumed_collect_whose_group_is_refused_now_takes_another(tmp_path: Path) -> None:
    async def act(policy: GroupPolicy) -> list[str]:
        config = config_of(journal=tmp_path / "journal", samples_per_prompt=2)
        async with rollout.open_rollout(config, resume=True) as runtime:
            return uids(await runtime.collect(source(), 1, step=0, policy=policy))

    assert run_virtual(lambda: act(GroupPolicy(members=1))) == ["p0"]
    refusing = GroupPolicy(members=2, accept=lambda group: group.uid != "p0")
    assert run_virtual(lambda: act(refusing)) == ["p1"]
