"""`group_reward`: one call for a group whose members have ended, and what it leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import rollout
from harness import Recorder
from race_situations import add, user
from rollout import Group, Outcome, Prompt, Reward, Trajectory
from rollout.batch import RolloutBatch
from rollout.config import LengthsConfig, LimitsConfig, RewardsConfig, SchedulingConfig
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

MEMBERS = 3
LENGTHS = LengthsConfig(prompt=800, response=200)
#: Answers of some words, after a second.
SPOKEN = (
    Scenario(seed=3)
    .reply("", "", filler={"median": 40, "sigma": 0.6, "max": 150})
    .timing(base_s=1.0)
)


def by_length(group: Group) -> list[float]:
    """The rank of each answer."""
    lengths = [len(each.answer) for each in group.trajectories]
    return [float(sorted(lengths).index(length)) for length in lengths]


async def by_length_async(group: Group) -> list[float]:
    return by_length(group)


def nothing() -> list[float]:
    return []


async def run(
    group_reward: Any,
    prompts: int | list[Prompt] = 2,
    *,
    scenario: Scenario = SPOKEN,
    reward: Any = None,
    during: Callable[[Any], Awaitable[None]] | None = None,
    retries: int = 0,
    **limits: float,
) -> RolloutBatch:
    recorder = Recorder()
    config = scenario.config(
        lengths=LENGTHS,
        limits=LimitsConfig(**limits),
        rewards=RewardsConfig(retries=retries),
        scheduling=SchedulingConfig(samples_per_prompt=MEMBERS, max_failures=None),
    )
    given = [user(f"p{at}") for at in range(prompts)] if isinstance(prompts, int) else prompts
    async with recorder.open_rollout(config, [add], reward, group_reward=group_reward) as runtime:
        async with anyio.create_task_group() as tasks:
            if during is not None:
                tasks.start_soon(during, runtime)
            batch: RolloutBatch = await runtime.generate(given)
    assert recorder.anomalies() == []
    return batch


@pytest.mark.parametrize("function", [by_length, by_length_async])
async def test_group_reward_gives_each_member_its_own(function: Any) -> None:
    batch = await run(function)
    for at in range(2):
        members = batch.trajectories[at * MEMBERS : (at + 1) * MEMBERS]
        lengths = [len(each.answer) for each in members]
        assert [each.reward for each in members] == [
            float(sorted(lengths).index(n)) for n in lengths
        ]
        assert all(each.trainable for each in members)
    assert not batch.tensors["rewards"].isnan().any()


async def test_group_reward_sees_the_group_in_member_order_with_its_versions() -> None:
    seen: dict[str, Group] = {}

    async def function(group: Group) -> list[float]:
        seen[group.uid] = group
        return [0.0] * len(group.trajectories)

    scenario = Scenario(seed=3, weight_version=7)
    batch = await run(function, 2, scenario=scenario)
    assert sorted(seen) == ["prompt-0", "prompt-1"]
    for at, group in enumerate(seen[uid] for uid in sorted(seen)):
        assert isinstance(group, rollout.Group)
        members = batch.trajectories[at * MEMBERS : (at + 1) * MEMBERS]
        assert {each.uid for each in members} == {group.uid, group.prompt.uid}
        assert all(group.prompt is each.prompt for each in members)
        assert [each.member for each in group.trajectories] == list(range(MEMBERS))
        assert (group.min_version, group.max_version) == (7, 7)
        assert [each.transcript for each in group.trajectories] == [t.transcript for t in members]


async def test_group_reward_follows_the_reward_of_each_and_takes_its_place() -> None:
    async def reward(trajectory: Trajectory) -> Reward:
        length = trajectory.transcript.response_length
        return Reward(value=float(trajectory.member), token_values=[0.5] * length)

    async def centred(group: Group) -> list[Reward]:
        given = [each.reward for each in group.trajectories]
        assert given == [0.0, 1.0, 2.0]
        return [
            Reward(value=value - 1.0, extra={"was": value}) for value in given if value is not None
        ]

    batch = await run(centred, 1, reward=reward)
    assert [each.reward for each in batch.trajectories] == [-1.0, 0.0, 1.0]
    assert [each.extra["was"] for each in batch.trajectories] == [0.0, 1.0, 2.0]
    assert batch.tensors["token_rewards"][0, 0] == 0.5


async def test_group_reward_of_a_group_with_failed_members_sees_them_without_reward() -> None:
    async def reward(trajectory: Trajectory) -> float:
        if trajectory.member == 1:
            raise OSError("no judge")
        return 1.0

    seen: list[list[tuple[float | None, Outcome]]] = []

    async def function(group: Group) -> list[float]:
        seen.append([(each.reward, each.outcome) for each in group.trajectories])
        return [5.0, float("nan"), 6.0]  # what is said of a failed one is not looked at

    batch = await run(function, 1, reward=reward)
    done, failed = Outcome.COMPLETED, Outcome.FAILED
    assert seen == [[(1.0, done), (None, failed), (1.0, done)]]
    assert [each.reward for each in batch.trajectories] == [5.0, None, 6.0]
    cause = batch.trajectories[1].cause
    assert cause is not None
    assert cause.message == "no judge"


async def test_group_reward_none_leaves_a_member_without_reward_and_untrained() -> None:
    async def function(group: Group) -> list[float | None]:
        return [1.0, None, 0.0]

    batch = await run(function, 1)
    assert [each.reward for each in batch.trajectories] == [1.0, None, 0.0]
    assert [each.trainable for each in batch.trajectories] == [True, False, True]
    assert batch.trajectories[1].outcome is Outcome.COMPLETED


def raising(group: Group) -> list[float]:
    raise OSError("no judge")


WRONG: list[tuple[Any, str]] = [
    (raising, "OSError: no judge"),
    (lambda group: [1.0], "the group reward function returned 1 rewards; expected 3, one for each"),
    (
        lambda group: [1.0, "good", 0.0],
        "the group reward function, for member 1, returned 'good'; expected a number or a Reward",
    ),
]


async def test_group_reward_that_raises_or_is_of_a_wrong_shape_leaves_the_group_unrewarded() -> (
    None
):
    async def mostly_wrong(group: Group) -> Any:
        at = int(group.uid.removeprefix("prompt-"))
        return WRONG[at][0](group) if at < len(WRONG) else by_length(group)

    batch = await run(mostly_wrong, len(WRONG) + 1)
    fine = batch.trajectories[-MEMBERS:]
    for at, each in enumerate(batch.trajectories[:-MEMBERS]):
        said = WRONG[at // MEMBERS][1]
        assert (each.outcome, each.reason) == (Outcome.FAILED, "group_reward")
        assert each.reward is None
        assert not each.trainable
        assert each.cause is not None
        assert said in f"{each.cause.type}: {each.cause.message}"
        assert each.transcript.generated_length  # its tokens stay
    assert all(each.reward is not None for each in fine)


async def test_group_reward_past_its_deadline_leaves_the_group_unrewarded() -> None:
    async def function(group: Group) -> list[float]:
        if group.uid == "prompt-0":
            await anyio.sleep_forever()
        return by_length(group)

    batch = await run(function, reward_s=10)
    late, fine = batch.trajectories[:MEMBERS], batch.trajectories[MEMBERS:]
    for each in late:
        assert (each.outcome, each.reason) == (Outcome.DEADLINE, "group_reward")
        assert each.limit_source == "limits.reward_s"
        assert each.cause is not None
        assert each.cause.message == (
            "limits.reward_s = 10 s is over: the group reward function had not returned"
        )
        assert each.metrics["group_reward_s"] == 10
    assert all(each.reward is not None for each in fine)


@pytest.mark.parametrize("ends", ["limits.reward_s", "cancel"])
async def test_reward_that_swallows_its_end_and_returns_counts_for_nothing(ends: str) -> None:
    async def swallow(trajectory: Trajectory) -> float:
        try:
            await anyio.sleep_forever()
        except BaseException:
            return 1.0

    async def cancel(runtime: Any) -> None:
        await anyio.sleep(30)
        assert runtime.cancel(reason="enough") == MEMBERS

    during = cancel if ends == "cancel" else None
    batch = await run(None, 1, reward=swallow, during=during, reward_s=100 if during else 10)
    expected: tuple[Any, ...] = (Outcome.DEADLINE, "reward", ends)
    if during is not None:
        expected = (Outcome.CANCELLED, "enough", None)
    for each in batch.trajectories:
        assert (each.outcome, each.reason, each.limit_source) == expected
        assert each.reward is None
        assert not each.trainable


async def test_group_reward_overlaps_the_generation_of_other_groups() -> None:
    called: list[tuple[str, float]] = []

    async def slow(group: Group) -> list[float]:
        called.append((group.uid, anyio.current_time() - began))
        await anyio.sleep(100)
        return by_length(group)

    began = anyio.current_time()
    batch = await run(slow, 4)
    starts = [at for _, at in called]
    assert len(starts) == 4
    assert min(starts) + 10 < max(starts)  # while others still generated
    assert anyio.current_time() - began == pytest.approx(max(starts) + 100, abs=5)
    assert all(each.reward is not None for each in batch.trajectories)


async def test_group_reward_is_asked_again_where_retries_say_so() -> None:
    times: list[float] = []

    async def function(group: Group) -> list[float]:
        times.append(anyio.current_time())
        if len(times) < 3:
            raise OSError("no judge")
        return by_length(group)

    batch = await run(function, 1, retries=2)
    assert all(each.reward is not None for each in batch.trajectories)
    assert [after - before for before, after in itertools.pairwise(times)] == [0.5, 1.0]


async def test_group_reward_streamed_trajectories_come_after_it() -> None:
    done: list[str] = []

    async def function(group: Group) -> list[float]:
        await anyio.sleep(5)
        done.append(group.uid)
        return by_length(group)

    config = SPOKEN.config(lengths=LENGTHS, scheduling=SchedulingConfig(samples_per_prompt=MEMBERS))
    received: list[tuple[str, int]] = []
    async with rollout.open_rollout(config, group_reward=function) as runtime:
        async with runtime.stream([user(f"p{at}") for at in range(4)]) as trajectories:
            async for each in trajectories:
                assert each.uid in done
                assert each.reward is not None
                received.append((each.uid, each.member))
    for uid in done:
        assert [member for each, member in received if each == uid] == [*range(MEMBERS)]


async def test_group_reward_of_cancelled_members_is_not_given() -> None:
    async def reward(trajectory: Trajectory) -> float:
        if trajectory.member == 2:
            await anyio.sleep(100)
        return 1.0

    async def function(group: Group) -> list[float | None]:
        return [each.reward for each in group.trajectories]

    async def cancel(runtime: Any) -> None:
        await anyio.sleep(50)
        assert runtime.cancel("prompt-0", 0, reason="enough") == 1  # it waits for its group

    batch = await run(function, 1, reward=reward, during=cancel)
    first, second, third = batch.trajectories
    assert (first.outcome, first.reason, first.reward) == (Outcome.CANCELLED, "enough", None)
    assert first.transcript.generated_length
    assert [second.reward, third.reward] == [1.0, 1.0]


async def test_group_reward_under_way_ends_once_all_its_members_are_cancelled() -> None:
    ended: list[float] = []

    async def function(group: Group) -> list[float]:
        try:
            await anyio.sleep(1000)
        finally:
            ended.append(anyio.current_time())
        return by_length(group)

    async def cancel(runtime: Any) -> None:
        began = anyio.current_time()
        await anyio.sleep(100)
        runtime.cancel("prompt-0", 0, reason="one")
        await anyio.sleep(100)
        assert not ended
        runtime.cancel("prompt-0", reason="all")
        await anyio.sleep(1)
        assert ended == [began + 200]

    batch = await run(function, 1, during=cancel)
    assert [each.reason for each in batch.trajectories] == ["one", "all", "all"]
    assert {each.outcome for each in batch.trajectories} == {Outcome.CANCELLED}


async def test_group_reward_cancelled_by_the_caller_leaves_the_runtime_usable() -> None:
    async def function(group: Group) -> list[float]:
        if group.uid == "slow":
            await anyio.sleep_forever()
        return by_length(group)

    recorder = Recorder()
    config = SPOKEN.config(lengths=LENGTHS, scheduling=SchedulingConfig(samples_per_prompt=MEMBERS))
    async with recorder.open_rollout(config, group_reward=function) as runtime:
        with anyio.move_on_after(60) as scope:
            await runtime.generate([user("a", uid="slow"), user("b", uid="quick")])
        assert scope.cancelled_caught
        batch = await runtime.generate([user("c", uid="again")])
    assert all(each.reward is not None for each in batch.trajectories)
    assert recorder.anomalies() == []


async def test_group_reward_is_not_asked_about_a_group_without_trainable_members() -> None:
    asked: list[str] = []

    async def function(group: Group) -> list[float]:
        asked.append(group.uid)
        return by_length(group)

    given = [user("a", uid="none", agent_name="nobody"), user("b", uid="fine")]
    batch = await run(function, given)
    assert asked == ["fine"]
    assert {each.outcome for each in batch.trajectories[:MEMBERS]} == {Outcome.REJECTED}


async def test_group_reward_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(rollout.ConfigError, match=r"^group_reward = nothing \("):
        async with rollout.open_rollout(SPOKEN.config(), group_reward=nothing):
            pass
