"""A call of groups that gives up since too many were refused says why the first one was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import rollout
from rollout import AgentLoop, GroupPolicy, LimitExceeded, Prompt, register_agent
from rollout.agents import AgentContext
from rollout.config import AgentConfig, LimitsConfig, SchedulingConfig
from rollout.scheduling import has_signal
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

SCENARIO = Scenario(seed=1).reply("", filler=12).timing(base_s=0.01, slope_s=0.0)


@register_agent("ends_in_ways")
class EndsInWays(AgentLoop):
    """Does as its prompt says."""

    async def run(self, context: AgentContext) -> None:
        way = context.prompt.extra["way"]
        if way == "raises":
            raise ValueError("the database is gone") from OSError("no route to host")
        await context.generate()
        context.reward = 1.0
        if way == "member 1 raises" and context.identity.member:
            raise ValueError("the database is gone")


def endless(way: str) -> Iterator[Prompt]:
    for index in range(1000):
        message = {"role": "user", "content": "Go."}
        yield Prompt(messages=[message], uid=f"p{index}", extra={"way": way})


def config(scenario: Scenario = SCENARIO, **sections: Any) -> Any:
    return scenario.config(
        agent=AgentConfig(name="ends_in_ways"),
        scheduling=SchedulingConfig(samples_per_prompt=3, max_retries=0, max_in_flight=12),
        **sections,
    )


async def give_up(whole: Any, policy: GroupPolicy, way: str = "generates", **given: Any) -> str:
    """What `collect` says that gives up."""
    async with rollout.open_rollout(whole, **given) as runtime:
        with pytest.raises(LimitExceeded, match="max_refused") as caught:
            await runtime.collect(endless(way), 1, policy=policy)
        statistics = runtime.statistics()
        assert statistics.admitted == statistics.finished
    assert caught.value.source == "scheduling.groups.max_refused"
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("raises", "3 × unknown; p0/0 failed (agent): OSError('no route to host')"),
        ("generates", "'p0', by has_signal with the rewards 3 × 1"),
        ("member 1 raises", "2 × unknown, 1 × 1; p0/1 failed (agent): ValueError('the database is"),
    ],
)
async def test_collect_that_gives_up_names_the_first_cause(way: str, said: str) -> None:
    policy = GroupPolicy(accept=has_signal, max_refused=2)
    told = await give_up(config(), policy, way)
    assert "max_refused = 2: 3 groups were refused and 0 accepted; the first: 'p0', by" in told
    assert said in told


async def test_collect_names_what_an_engine_said_that_fails_all_generations() -> None:
    broken = config(SCENARIO.fault(wrong_length=1.0))
    said = await give_up(broken, GroupPolicy(accept=has_signal, max_refused=0))
    assert "'p0', by has_signal with the rewards 3 × unknown; p0/0 failed (engine): " in said
    assert "EngineError('" in said


async def test_collect_names_what_a_reward_function_raised() -> None:
    def reward(trajectory: rollout.Trajectory) -> float:
        raise KeyError("answer")

    policy = GroupPolicy(accept=has_signal, max_refused=0)
    said = await give_up(config(), policy, reward=reward)
    assert "the first: 'p0', by has_signal" in said
    assert "reward of p0 failed: KeyError(" in said


async def test_collect_names_a_members_limit_where_none_failed() -> None:
    hurried = config(limits=LimitsConfig(trajectory_s=0.001))
    said = await give_up(hurried, GroupPolicy(accept=has_signal, max_refused=0))
    assert "3 × unknown; p0/0 deadline (trajectory)" in said


async def test_collect_names_the_deadline_of_groups_that_are_replaced() -> None:
    hasty = GroupPolicy(group_s=0.001, on_group_deadline="refill", max_refused=1)
    said = await give_up(config(), hasty)
    assert (
        "2 groups were refused or met group_s and 0 accepted; the first: 'p0' met group_s" in said
    )


async def test_stream_gives_up_once_so_many_were_refused_one_after_the_other() -> None:
    judged: list[str] = []
    taken: list[str] = []

    def accept(group: rollout.Group) -> bool:
        judged.append(group.uid)
        return len(judged) in (2, 4)

    policy = GroupPolicy(accept=accept, max_refused=1)
    async with rollout.open_rollout(config()) as runtime:
        with pytest.raises(LimitExceeded, match="one after the other were refused") as caught:
            async with runtime.stream_groups(endless("generates"), policy=policy) as groups:
                async for group in groups:
                    taken.append(group.uid)  # noqa: PERF401  (it ends with an error)
    assert taken == [judged[1], judged[3]]
    assert f"the first: {judged[4]!r}, by accept" in str(caught.value)
