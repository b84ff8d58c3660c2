"""Groups: as many as a trainer asks for, pulled as places come free, none lost and none twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import attrs
import pytest

import rollout
from rollout import Group, GroupPolicy, Outcome, Prompt
from rollout.config import AgentConfig, LimitsConfig, SchedulingConfig
from rollout.engine import DiskWeights
from rollout.errors import ConfigError, LimitExceeded, PromptError
from rollout.scheduling import has_signal
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio


def user(text: str, **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


def prompts(count: int, text: str = "go") -> list[Prompt]:
    return [user(text, uid=f"p{index}") for index in range(count)]


class Counted:
    """An endless loader that says how often it was asked."""

    def __init__(self, texts: Any = None) -> None:
        self.count = 0
        self._texts = texts or {}

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            index, self.count = self.count, self.count + 1
            yield user(self._texts.get(index, "go"), uid=f"p{index}")


SCENARIO = (
    Scenario(seed=1)
    .reply("slow", filler=1000)
    .reply("", filler=20)
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)


def config(scenario: Scenario = SCENARIO, samples: int = 2, **scheduling: Any) -> Any:
    return scenario.config(
        agent=AgentConfig(name="single_turn"),
        scheduling=SchedulingConfig(
            **{"samples_per_prompt": samples, "max_in_flight": 256, **scheduling}
        ),
    )


def uids(batch: Any) -> list[str]:
    return [t.uid for t in batch.trajectories]


async def test_collect_takes_as_many_groups_as_asked_and_leaves_the_source_where_it_was() -> None:
    source = Counted()
    async with rollout.open_rollout(config()) as runtime:
        first = await runtime.collect(source, 3)
        assert uids(first) == ["p0", "p0", "p1", "p1", "p2", "p2"]
        assert [t.member for t in first.trajectories] == [0, 1] * 3
        assert [t.group for t in first.trajectories] == [0, 0, 1, 1, 2, 2]
        assert first.metrics["groups/accepted"] == 3
        second = await runtime.collect(source, groups=2, step=1)
        assert uids(second) == ["p3", "p3", "p4", "p4"]
        assert source.count == 5
        statistics = runtime.statistics()
        assert (statistics.admitted, statistics.finished, statistics.running) == (10, 10, 0)


async def test_collect_says_what_generate_says() -> None:
    async with rollout.open_rollout(config()) as runtime:
        generated = await runtime.generate(prompts(3), step=5)
        collected = await runtime.collect(prompts(3), 3, step=5)
    for one, other in zip(generated.trajectories, collected.trajectories, strict=True):
        assert one.transcript.ids_bytes() == other.transcript.ids_bytes()


async def test_collect_pulls_only_as_places_come_free() -> None:
    source = Counted()
    async with rollout.open_rollout(config(max_in_flight=4)) as runtime:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.collect, source, 10)
            await anyio.sleep(0.1)
            assert source.count == 2
            assert runtime.statistics().running == 4


async def test_collect_surplus_is_cancelled_and_its_prompts_come_first_next_time() -> None:
    source = Counted({0: "slow"})
    policy = GroupPolicy(oversample=2.0)
    async with rollout.open_rollout(config()) as runtime:
        first = await runtime.collect(source, 1, policy=policy)
        assert uids(first) == ["p1", "p1"]
        assert first.metrics["groups/cancelled"] == 1
        assert runtime.statistics().outcomes == {"completed": 2, "cancelled": 2}
        second = await runtime.collect(source, 1)
        assert uids(second) == ["p0", "p0"]
        assert source.count == 2


async def test_collect_k_of_n_members_takes_the_first_to_end() -> None:
    scenario = Scenario(seed=3).reply("", filler={"median": 100, "sigma": 1.0, "max": 3000})
    async with rollout.open_rollout(config(scenario, samples=6)) as runtime:
        batch = await runtime.collect(Counted(), 2, policy=GroupPolicy(members=4))
        lengths = runtime.statistics()
    assert len(batch.trajectories) == 8
    assert lengths.outcomes == {"completed": 8, "cancelled": 4}
    members = [t.member for t in batch.trajectories[:4]]
    assert members == sorted(members)
    assert batch.metrics["selection/length_bias"] < 1


async def test_collect_refuses_groups_and_refills() -> None:
    source = Counted()
    policy = GroupPolicy(accept=lambda group: group.uid in ("p2", "p5"))
    async with rollout.open_rollout(config()) as runtime:
        batch = await runtime.collect(source, 2, policy=policy)
    assert uids(batch) == ["p2", "p2", "p5", "p5"]
    assert batch.metrics["groups/refused"] >= 4


async def test_collect_too_many_refused_is_an_error_with_what_there_is() -> None:
    policy = GroupPolicy(accept=lambda group: group.uid == "p0", max_refused=3)
    async with rollout.open_rollout(config()) as runtime:
        with pytest.raises(LimitExceeded, match="max_refused = 3") as caught:
            await runtime.collect(Counted(), 2, policy=policy)
        assert uids(caught.value.partial) == ["p0", "p0"]
        assert caught.value.source == "scheduling.groups.max_refused"
        assert runtime.statistics().running == 0


def test_has_signal_wants_different_rewards_of_trainable_members() -> None:
    def group(*rewards: float | None, trainable: bool = True) -> Group:
        trajectories = [
            rollout.Trajectory(
                uid="p",
                group=0,
                member=index,
                outcome=Outcome.COMPLETED,
                reward=reward,
                trainable=trainable,
            )
            for index, reward in enumerate(rewards)
        ]
        return Group(uid="p", prompt=user("x"), trajectories=trajectories)

    assert has_signal(group(0.0, 1.0))
    assert not has_signal(group(1.0, 1.0))
    assert not has_signal(group(0.3, 0.1 + 0.2))  # which float32 does not tell apart
    assert not has_signal(group(1.0, None))
    assert not has_signal(group(0.0, 1.0, trainable=False))


async def test_collect_accept_by_name_and_wrong_names() -> None:
    scenario = Scenario(seed=1).reply("", filler={"median": 30, "sigma": 1.0, "max": 300})
    named = config(scenario, groups=GroupPolicy(accept="rollout.scheduling:has_signal"))

    async def reward(trajectory: Any) -> float:
        return float(trajectory.transcript.generated_length)

    async with rollout.open_rollout(named, reward=reward) as runtime:
        batch = await runtime.collect(Counted(), 2)
        assert batch.metrics["selection/reward/accepted"] > 0
        with pytest.raises(ConfigError, match="has no 'nothing'"):
            await runtime.collect(
                Counted(), 2, policy=GroupPolicy(accept="rollout.scheduling:nothing")
            )


async def test_stream_groups_gives_groups_as_they_finish() -> None:
    source = Counted({0: "slow"})
    async with rollout.open_rollout(config(max_in_flight=4)) as runtime:
        async with runtime.stream_groups(source) as groups:
            found = [await anext(groups) for _ in range(3)]
        assert [group.uid for group in found] == ["p1", "p2", "p3"]
        assert found[0].min_version == found[0].max_version == 0
        batch = await runtime.make_batch(found)
        assert uids(batch) == ["p1", "p1", "p2", "p2", "p3", "p3"]
        assert batch.tensors["groups"].tolist() == [0, 0, 1, 1, 2, 2]
        assert runtime.statistics().running == 0
        again = await runtime.collect(source, 1)
        assert uids(again) == ["p0", "p0"]


async def test_stream_groups_slow_consumer_holds_admission_back() -> None:
    source = Counted()
    async with rollout.open_rollout(config(max_in_flight=2)) as runtime:
        async with runtime.stream_groups(source) as groups:
            await anext(groups)
            await anyio.sleep(100.0)
            assert source.count <= 1 + 2 + 1
            pulled = source.count
        async with runtime.stream_groups(source) as groups:
            kept = [(await anext(groups)).uid for _ in range(pulled - 1)]
        assert sorted(kept) == [f"p{index}" for index in range(1, pulled)]


async def test_collect_source_that_raises_leaves_its_error_as_itself() -> None:
    def broken() -> Iterator[Prompt]:
        yield user("go", uid="p0")
        raise LookupError("no more data")

    async with rollout.open_rollout(config()) as runtime:
        with pytest.raises(LookupError, match="no more data"):
            await runtime.collect(broken(), 2)
        with pytest.raises(PromptError, match="source: prompt 1: expected a Prompt, got int"):
            await runtime.collect([user("go"), 3], 3)  # type: ignore[list-item]  # and p0
        assert runtime.statistics().running == 0


async def test_collect_group_reward_ranks_the_wanted_members() -> None:
    asked: list[list[int]] = []

    async def rank(group: Group) -> list[float]:
        asked.append([t.member for t in group.trajectories])
        await anyio.sleep(1.0)
        lengths = sorted(t.generated_length for t in group.trajectories)
        return [float(lengths.index(t.generated_length)) for t in group.trajectories]

    scenario = Scenario(seed=3).reply("", filler={"median": 100, "sigma": 1.0, "max": 3000})
    policy = GroupPolicy(members=3, accept=has_signal)
    async with rollout.open_rollout(config(scenario, samples=5), group_reward=rank) as runtime:
        batch = await runtime.collect(Counted(), 2, policy=policy)
    assert len(asked) == 2
    found = [t.member for t in batch.trajectories]
    assert sorted([found[:3], found[3:]]) == sorted(asked)
    assert sorted(t.reward for t in batch.trajectories[:3]) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": 3, "groups": 1}, "source: expected an iterable or async iterable of Prompt"),
        ({"source": [], "groups": 0}, "groups = 0: expected an integer ≥ 1"),
        ({"source": [], "groups": 1, "policy": 3}, "policy = 3: expected a GroupPolicy"),
        (
            {"source": [], "groups": 1, "policy": GroupPolicy(members=3)},
            "policy.members = 3: expected at most scheduling.samples_per_prompt = 2",
        ),
    ],
)
async def test_collect_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    async with rollout.open_rollout(config()) as runtime:
        with pytest.raises(PromptError, match=message):
            await runtime.collect(**arguments)


async def test_collect_group_deadline_keeps_drops_or_refills() -> None:
    for action, expected in (("keep", ["p0", "p1"]), ("drop", ["p1"]), ("refill", ["p1", "p2"])):
        source = Counted({0: "slow"})
        policy = GroupPolicy(group_s=5.0, on_group_deadline=action)
        async with rollout.open_rollout(config(max_in_flight=4)) as runtime:
            batch = await runtime.collect(source, 2, policy=policy)
        assert list(dict.fromkeys(uids(batch))) == expected
        cut = [t for t in batch.trajectories if t.outcome is Outcome.DEADLINE]
        assert len(cut) == (2 if action == "keep" else 0)
        assert {t.limit_source for t in cut} <= {"scheduling.groups.group_s"}


async def test_collect_batch_deadline_is_an_error_with_what_there_is() -> None:
    slow = attrs.evolve(config(max_in_flight=2), limits=LimitsConfig(batch_s=8.0))
    async with rollout.open_rollout(slow) as runtime:
        began = anyio.current_time()
        with pytest.raises(LimitExceeded, match=r"limits.batch_s = 8 s is over") as caught:
            await runtime.collect(Counted({1: "slow"}), 3)
        assert anyio.current_time() - began < 10
    outcomes = [(t.uid, str(t.outcome)) for t in caught.value.partial.trajectories]
    assert outcomes == [("p0", "completed")] * 2 + [("p1", "deadline")] * 2


async def test_collect_runtime_cancel_returns_what_there_is() -> None:
    async with rollout.open_rollout(config(max_in_flight=4)) as runtime:
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                await anyio.sleep(1.0)
                assert runtime.cancel(reason="enough") == 4

            tasks.start_soon(cancel)
            batch = await runtime.collect(Counted({1: "slow", 2: "slow"}), 4)
    assert [str(t.outcome) for t in batch.trajectories] == ["completed"] * 2 + ["cancelled"] * 4


async def test_collect_cancelled_by_its_caller_loses_no_prompt() -> None:
    source = Counted({0: "slow"})
    async with rollout.open_rollout(config()) as runtime:
        with anyio.move_on_after(2.0) as scope:
            await runtime.collect(source, 3)
        assert scope.cancelled_caught
        assert runtime.statistics().running == 0
        assert uids(await runtime.collect(source, 3))[::2] == ["p0", "p1", "p2"]
        assert source.count == 3


async def test_collect_failed_member_is_restarted_alone() -> None:
    tries: dict[int, int] = {}

    @rollout.register_agent("fails_once")
    class FailsOnce(rollout.AgentLoop):
        async def run(self, context: rollout.AgentContext) -> None:
            member = context.identity.member
            tries[member] = tries.get(member, 0) + 1
            if member == 1 and tries[member] == 1:
                raise OSError("the sandbox is gone")
            await context.generate()

    failing = SCENARIO.config(
        agent=AgentConfig(name="fails_once"),
        scheduling=SchedulingConfig(samples_per_prompt=3, groups=GroupPolicy(refill_failed=True)),
    )
    async with rollout.open_rollout(failing) as runtime:
        batch = await runtime.collect(prompts(1), 1)
        assert runtime.statistics().outcomes == {"completed": 3}
    assert [t.metrics["attempts"] for t in batch.trajectories] == [1, 2, 1]
    assert tries == {0: 1, 1: 2, 2: 1}
    assert [str(t.outcome) for t in batch.trajectories] == ["completed"] * 3
    assert batch.metrics["groups/refilled"] == 1


@pytest.mark.parametrize("staleness", [0, 3])
async def test_stream_groups_staleness_is_bounded_and_no_work_is_thrown_away(
    staleness: int, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = Scenario(seed=2).reply("", filler={"median": 50, "sigma": 1.5, "max": 4000})
    source = Counted()
    async with rollout.open_rollout(config(lengths, max_in_flight=12)) as runtime:
        version, taken, seen = 0, 0, []
        async with runtime.stream_groups(
            source, max_staleness=staleness, groups_per_step=3
        ) as groups:
            async for group in groups:
                taken += 1
                assert group.min_version is not None
                seen.append(version - group.min_version)
                assert source.count <= (staleness + 1 + version) * 3
                if taken % 3 == 0:
                    version += 1
                    await runtime.update_weights(version=version, source=DiskWeights("."))
                if taken == 15:
                    break
            assert groups.metrics()["groups/accepted"] == 15
        assert max(seen) <= staleness
        assert "max_staleness" not in caplog.text
        assert runtime.statistics().outcomes["completed"] >= 30


async def test_stream_groups_version_does_not_rise_admission_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Counted()
    async with rollout.open_rollout(config()) as runtime:
        async with runtime.stream_groups(source, max_staleness=1, groups_per_step=2) as groups:
            for _ in range(4):
                await anext(groups)
            with anyio.move_on_after(100.0) as scope:
                await anext(groups)
            assert scope.cancelled_caught
            assert source.count == 4
            assert caplog.text.count("waits for update_weights: 4 groups were taken") == 1
            await runtime.update_weights(version=1, source=DiskWeights("."))
            group = await anext(groups)
            assert group.min_version == 1


async def test_collect_same_uid_again_is_told_apart() -> None:
    async with rollout.open_rollout(config()) as runtime:
        batch = await runtime.collect([user("go", uid="p")] * 3, 3)
    assert uids(batch)[::2] == ["p", "p@2", "p@3"]
    assert len({t.transcript.ids_bytes() for t in batch.trajectories}) == 6
