"""What a call of groups takes, counts and says of its groups, with a journal and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollout
from rollout import Group, GroupPolicy, Outcome, Prompt
from rollout.agents import AgentContext, AgentLoop
from rollout.config import AgentConfig, JournalConfig, LimitsConfig, SchedulingConfig
from rollout.errors import LimitExceeded, PromptError
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

SCENARIO = (
    Scenario(seed=1)
    .reply("slow", filler=4000)
    .reply("", filler=20)
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)


def config(*, members: int = 1, journal: Path | None = None, **sections: Any) -> Any:
    scheduling = sections.pop("scheduling", {})
    return SCENARIO.config(
        agent=AgentConfig(name=sections.pop("agent", "single_turn")),
        journal=JournalConfig(path=None if journal is None else str(journal)),
        scheduling=SchedulingConfig(samples_per_prompt=members, **scheduling),
        **sections,
    )


def source() -> Iterator[Prompt]:
    for at in range(1_000_000):
        yield Prompt(messages=[{"role": "user", "content": "go"}], uid=f"p{at}")


def uids(batch: Any) -> list[str]:
    return [t.uid for t in batch.trajectories]


async def test_collect_resumed_gives_what_it_gave_whatever_accept_says_now(
    tmp_path: Path,
) -> None:
    journal = config(journal=tmp_path / "journal")
    odd = GroupPolicy(accept=lambda group: group.uid in ("p1", "p3"))
    async with rollout.open_rollout(journal) as runtime:
        assert uids(await runtime.collect(source(), 2, policy=odd, step=0)) == ["p1", "p3"]

    def refuse(group: Group) -> bool:
        raise AssertionError(f"asked of {group.uid}")

    async with rollout.open_rollout(journal, resume=True) as runtime:
        again = await runtime.collect(source(), 2, policy=GroupPolicy(accept=refuse), step=0)
    assert uids(again) == ["p1", "p3"]


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


async def test_collect_with_a_journal_holds_its_budget_of_failures(tmp_path: Path) -> None:
    few = {"max_failures": 2, "max_failure_share": 0.1}
    async with rollout.open_rollout(
        config(members=2, journal=tmp_path / "journal", scheduling=few), reward=unwritable
    ) as runtime:
        with pytest.raises(LimitExceeded, match="max_failures"):
            await runtime.collect(source(), 20)


class Uneven(AgentLoop):
    """Of the members of a group the first two meet a deadline before the others complete."""

    async def run(self, context: AgentContext) -> None:
        if context.identity.member < 2:
            await context.generate()  # 40 s of tokens
        await anyio.sleep(5.5)


rollout.register_agent("uneven")(Uneven)


async def test_collect_k_of_n_prefers_members_that_a_trainer_may_learn_from() -> None:
    uneven = config(members=4, agent="uneven", limits=LimitsConfig(generation_s=5.0))
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


def raising(_: Group) -> bool:
    raise ZeroDivisionError


@pytest.mark.parametrize("accept", [raising, lambda _: "yes"], ids=["raises", "no_bool"])
@pytest.mark.parametrize("surplus", ["cancel", "carry"])
async def test_groups_that_accept_says_nothing_of_are_given_to_nobody_and_stay(
    accept: Callable[[Group], Any], surplus: Any
) -> None:
    given = source()
    async with rollout.open_rollout(config()) as runtime:
        got = []
        wrong = GroupPolicy(accept=accept, surplus=surplus)
        with pytest.raises((ZeroDivisionError, PromptError)) as caught:
            async with runtime.stream_groups(given, policy=wrong) as groups:
                got += [group.uid async for group in groups]
        assert got == []
        with pytest.raises((ZeroDivisionError, PromptError)) as caught:
            await runtime.collect(given, 2, policy=wrong)
        assert caught.value.partial.trajectories == []  # type: ignore[union-attr]
        completed = runtime.statistics().outcomes[Outcome.COMPLETED]
        batch = await runtime.collect(given, 1)
        assert uids(batch) == ["p0"]
        assert runtime.statistics().outcomes[Outcome.COMPLETED] == completed  # not run again


async def test_batch_of_says_nothing_of_time_and_refuses_what_are_no_groups() -> None:
    async with rollout.open_rollout(config()) as runtime:
        async with runtime.stream_groups(source()) as groups:
            found = [await anext(groups) for _ in range(2)]
        metrics = (await runtime.batch_of(found)).metrics
        assert not [name for name in metrics if name.startswith(("batch_s", "throughput", "loop"))]
        assert metrics["weights/version"] == 0
        with pytest.raises(PromptError, match=r"groups\[1\] = 1: expected a Group"):
            await runtime.batch_of([found[0], 1])  # type: ignore[list-item]
        with pytest.raises(PromptError, match="groups = None: expected a list of the groups"):
            await runtime.batch_of(None)  # type: ignore[arg-type]
