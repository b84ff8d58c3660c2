"""What a call of groups takes, counts and says of its groups, with a journal and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import rollout
from rollout import Group, GroupPolicy, Outcome, Prompt
from rollout.agents import AgentContext, AgentLoop
from rollout.batch.advantages import group_relative
from rollout.config import AgentConfig, JournalConfig, LimitsConfig, SchedulingConfig
from rollout.errors import ConfigError, LimitExceeded, PromptError
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

SCENARIO = (
    Scenario(seed=1)
    .reply("slow", filler=4000)
    .reply("some", filler=400)
    .reply("", filler=20)
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)


def config(*, members: int = 1, journal: Path | None = None, **sections: Any) -> Any:
    scheduling = sections.pop("scheduling", {})
    return SCENARIO.config(
        agent=AgentConfig(name=sections.pop("agent", "single_turn")),
        journal=JournalConfig(path=None if journal is None else str(journal)),
        scheduling=SchedulingConfig(
            **{"samples_per_prompt": members, "max_in_flight": 64, **scheduling}
        ),
        **sections,
    )


def source() -> Iterator[Prompt]:
    for at in range(1_000_000):
        yield Prompt(messages=[{"role": "user", "content": "go"}], uid=f"p{at}")


def uids(batch: Any) -> list[str]:
    return [t.uid for t in batch.trajectories]


def unwritable(_: Any) -> rollout.Reward:
    return rollout.Reward(value=1.0, extra={"object": object()})


@pytest.mark.parametrize(
    "rewards",
    [{"reward": unwritable}, {"group_reward": lambda g: [unwritable(t) for t in g.trajectories]}],
    ids=["reward", "group_reward"],
)
async def test_collect_counts_what_the_journal_cannot_hold_as_failed(
    rewards: Any, tmp_path: Path
) -> None:
    async with rollout.open_rollout(
        config(members=2, journal=tmp_path / "journal"), **rewards
    ) as runtime:
        batch = await runtime.collect(source(), 2)
        assert {t.reason for t in batch.trajectories} == {"journal"}
        assert runtime.statistics().outcomes == {Outcome.FAILED: 4}


@rollout.register_agent("uneven_members")
class Uneven(AgentLoop):
    """Of the members of a group the first two meet a deadline before the others complete."""

    async def run(self, context: AgentContext) -> None:
        if context.identity.member < 2:
            await context.generate()  # 40 s of tokens
        await anyio.sleep(5.5)
        async with context.open_segment([{"role": "user", "content": "quick"}]) as other:
            await other.generate()


async def test_collect_k_of_n_prefers_members_that_a_trainer_may_learn_from() -> None:
    uneven = config(members=4, agent="uneven_members", limits=LimitsConfig(generation_s=5.0))
    async with rollout.open_rollout(uneven) as runtime:
        slow = [Prompt(messages=[{"role": "user", "content": "slow"}], uid="p0")]
        batch = await runtime.collect(slow, 1, policy=GroupPolicy(members=2))
    assert [(t.member, t.outcome) for t in batch.trajectories] == [
        (2, Outcome.COMPLETED),
        (3, Outcome.COMPLETED),
    ]


async def test_collect_k_of_n_fills_up_with_members_that_are_not_trainable() -> None:
    short = config(members=3, limits=LimitsConfig(generation_s=0.1))
    async with rollout.open_rollout(short) as runtime:
        batch = await runtime.collect(source(), 1, policy=GroupPolicy(members=2))
    assert [t.outcome for t in batch.trajectories] == [Outcome.DEADLINE] * 2


async def test_collect_member_cancelled_by_the_caller_does_not_stand_for_its_group() -> None:
    async with rollout.open_rollout(config(members=2)) as runtime:
        found: list[Any] = []

        async def take() -> None:
            found.append(await runtime.collect(source(), 1, policy=GroupPolicy(members=1)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            await anyio.sleep(0.1)
            assert runtime.cancel("p0", 0) == 1
    assert [(t.member, t.outcome) for t in found[0].trajectories] == [(1, Outcome.COMPLETED)]


def raising(group: Group) -> bool:
    raise ZeroDivisionError(f"no judge of {group.uid}")


@pytest.mark.parametrize(
    ("accept", "error", "said"),
    [
        (raising, ZeroDivisionError, "no judge of p"),
        (lambda _: None, PromptError, "accept returned None for 'p"),
    ],
    ids=["raises", "no_bool"],
)
async def test_groups_that_accept_says_nothing_of_are_given_to_nobody_and_stay(
    accept: Callable[[Group], Any], error: type[Exception], said: str
) -> None:
    given = source()
    async with rollout.open_rollout(config(scheduling={"max_in_flight": 8})) as runtime:
        got = []
        wrong = GroupPolicy(accept=accept, surplus="carry")
        with pytest.raises(error, match=said):
            async with runtime.stream_groups(given, policy=wrong) as groups:
                got += [group.uid async for group in groups]
        assert got == []
        with pytest.raises(error, match=said) as caught:
            await runtime.collect(given, 2, policy=wrong)
        assert runtime.statistics().running == 0
        assert caught.value.partial.trajectories == []  # type: ignore[union-attr]
        assert uids(await runtime.collect(given, 8)) == [f"p{at}" for at in range(8)]


async def test_batch_of_what_are_no_groups_is_refused_by_position() -> None:
    async with rollout.open_rollout(config()) as runtime:
        with pytest.raises(PromptError, match=r"groups\[0\] = 1: expected a Group"):
            await runtime.make_batch([1])  # type: ignore[list-item]


async def test_batch_of_groups_that_stand_in_another_batch_too_leaves_that_as_it_is() -> None:
    async with rollout.open_rollout(config(members=2), reward=lambda t: float(t.member)) as runtime:
        async with runtime.stream_groups(source()) as groups:
            found = [await anext(groups) for _ in range(3)]
        first = await runtime.make_batch(found[:2])
        for others in ([found[1], found[0]], [found[1], found[2]]):
            batch = await runtime.make_batch(others)
            assert [t.group for t in batch.trajectories] == [0, 0, 1, 1]
            assert [t.group for t in first.trajectories] == [0, 0, 1, 1]
            assert group_relative(first, divide_by_std=False).tolist() == [-0.5, 0.5, -0.5, 0.5]


async def test_members_whose_reward_fails_are_not_run_again() -> None:
    def fail(_: Any) -> float:
        raise ValueError("no judge")

    policy = GroupPolicy(refill_failed=True)
    unbounded = {"max_failures": None}
    async with rollout.open_rollout(
        config(members=2, scheduling=unbounded), reward=fail
    ) as runtime:
        batch = await runtime.collect(source(), 1, policy=policy)
        assert {(t.outcome, t.reason) for t in batch.trajectories} == {(Outcome.FAILED, "reward")}
        assert batch.metrics["groups/refilled"] == 0
        assert runtime.statistics().admitted == 2


@pytest.mark.parametrize(("groups", "times", "started"), [(10, 1.1, 11), (3, 1.5, 4)])
async def test_collect_starts_no_more_groups_than_oversample_says(
    groups: int, times: float, started: int
) -> None:
    async with rollout.open_rollout(config()) as runtime:
        await runtime.collect(source(), groups, policy=GroupPolicy(oversample=times))
        assert runtime.statistics().admitted == started


async def agree(group: Group) -> bool:
    return True


def test_accept_that_is_a_coroutine_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"accept = <function agree .*expected .* \(no coroutine"):
        GroupPolicy(accept=agree)


async def test_stream_of_groups_that_all_meet_their_deadline_ends_with_an_error() -> None:
    hasty = GroupPolicy(group_s=0.05, on_group_deadline="refill", max_refused=5)
    async with rollout.open_rollout(config()) as runtime:
        with pytest.raises(LimitExceeded, match="6 groups one after the other were refused or met"):
            async with runtime.stream_groups(source(), policy=hasty) as groups:
                await anext(groups)


async def test_collect_whose_tensors_cannot_be_made_loses_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise MemoryError

    given = source()
    async with rollout.open_rollout(config()) as runtime:
        with monkeypatch.context() as patch:
            patch.setattr("rollout.batch.collate", no_room)
            with pytest.raises(MemoryError):
                await runtime.collect(given, 2)
        assert uids(await runtime.collect(given, 2)) == ["p0", "p1"]


async def test_generate_whose_tensors_cannot_be_made_has_them_packed_as_partial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rollout.batch import collate

    def padded_has_no_room(*args: Any, **named: Any) -> Any:
        if args[3] == "padded":
            raise MemoryError
        return collate(*args, **named)

    async with rollout.open_rollout(config()) as runtime:
        monkeypatch.setattr("rollout.batch.collate", padded_has_no_room)
        with pytest.raises(MemoryError) as caught:
            await runtime.generate([next(source())])
    assert uids(caught.value.partial) == ["p0"]  # type: ignore[attr-defined]


async def test_tensors_are_on_the_cpu_whatever_the_default_device_is() -> None:
    async with rollout.open_rollout(config()) as runtime:
        with torch.device("meta"):
            batch = await runtime.collect(source(), 2)
    assert {each.device.type for each in batch.tensors.values()} == {"cpu"}


async def test_time_that_the_runtime_sleeps_is_not_a_groups_own() -> None:
    alone = config(members=2, scheduling={"max_in_flight": 1})
    given = [Prompt(messages=[{"role": "user", "content": "some"}], uid="p0")]
    async with rollout.open_rollout(alone) as runtime:
        found: list[Any] = []

        async def take() -> None:
            found.append(await runtime.collect(given, 1, policy=GroupPolicy(group_s=9.0)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            await anyio.sleep(1.0)
            await runtime.sleep()
            await anyio.sleep(100.0)
            await runtime.wake_up()
    assert [t.outcome for t in found[0].trajectories] == [Outcome.COMPLETED] * 2


@rollout.register_agent("odd_ones_are_slow")
class OddOnesAreSlow(AgentLoop):
    """Generates, and where its member's number is odd works on for 30 s."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        await anyio.sleep(30.0 * (context.identity.member % 2))


async def test_member_that_waits_for_a_place_ends_with_its_groups_time() -> None:
    alone = config(members=2, scheduling={"max_in_flight": 1})
    given = [Prompt(messages=[{"role": "user", "content": "some"}], uid="p0")]
    async with rollout.open_rollout(alone) as runtime:
        batch = await runtime.collect(given, 1, policy=GroupPolicy(group_s=6.0))
    assert [(t.outcome, t.limit_source) for t in batch.trajectories] == [
        (Outcome.COMPLETED, None),
        (Outcome.DEADLINE, "scheduling.groups.group_s"),
    ]


REWARDS: dict[str, Any] = {
    "reward": lambda trajectory: 1.0,
    "group_reward": lambda group: [1.0] * len(group.trajectories),
}


@pytest.mark.parametrize("what", REWARDS)
async def test_agent_that_its_groups_time_cuts_off_is_rewarded_where_it_is_trainable(
    what: str,
) -> None:
    two = config(
        members=2,
        agent="odd_ones_are_slow",
        scheduling={"trainable": ("completed", "deadline")},
    )
    async with rollout.open_rollout(two, **{what: REWARDS[what]}) as runtime:
        batch = await runtime.collect(source(), 1, policy=GroupPolicy(group_s=6.0))
    assert [(t.outcome, t.reward, t.trainable) for t in batch.trajectories] == [
        (Outcome.COMPLETED, 1.0, True),
        (Outcome.DEADLINE, 1.0, True),
    ]
