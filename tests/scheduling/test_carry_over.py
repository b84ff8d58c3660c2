"""Carried trajectories: they stop at the next token, and continue first in the next call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import anyio
import pytest
from test_groups import Counted, user

import rollout
from rollout import AgentLoop, GroupPolicy, Outcome, Prompt, function_tool
from rollout.config import AgentConfig, LimitsConfig, SchedulingConfig, SimulatedEngine
from rollout.engine import DiskWeights
from rollout.testing import Scenario, tool_call
from rollout.tools import Tool, ToolSession

pytestmark = pytest.mark.anyio

SLOW = (
    Scenario(seed=1)
    .reply("slow", filler=1000)
    .reply("", filler=20)
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)
CARRY = GroupPolicy(surplus="carry", oversample=2.0)
ALONE = GroupPolicy(oversample=1.0)
TOOL_AGENT = AgentConfig(name="tool_agent")


def config(scenario: Scenario = SLOW, samples: int = 2, **sections: Any) -> Any:
    sections = {"agent": AgentConfig(name="single_turn"), **sections}
    return scenario.config(
        **{"scheduling": SchedulingConfig(samples_per_prompt=samples, groups=CARRY), **sections}
    )


@asynccontextmanager
async def carrying(*tools: Any, **sections: Any) -> AsyncIterator[tuple[Any, Counted]]:
    """A runtime that carries both members of p0, and the source, of which p1 was taken."""
    source = Counted({0: "slow"})
    async with rollout.open_rollout(config(**sections), tools) as runtime:
        first = await runtime.collect(source, 1, step=0)
        assert [t.uid for t in first.trajectories] == ["p1", "p1"]
        assert first.metrics["groups/carried"] == 1
        assert runtime.statistics().carried == 2
        yield runtime, source


async def alone(uid: str, text: str, **sections: Any) -> list[bytes]:
    """What a prompt's members say when nothing stops them."""
    async with rollout.open_rollout(config(**sections)) as runtime:
        batch = await runtime.generate([user(text, uid=uid)], step=0)
    return [t.transcript.ids_bytes() for t in batch.trajectories]


@rollout.register_agent("shields_its_generation")
class ShieldsItsGeneration(AgentLoop):
    async def run(self, context: Any) -> None:
        with anyio.CancelScope(shield=True):
            await context.generate()


async def test_carried_agent_that_shields_its_generation_ends_with_the_runtime() -> None:
    agent = AgentConfig(name="shields_its_generation")
    async with carrying(agent=agent):
        pass


async def test_carried_trajectory_continues_first_from_its_tokens() -> None:
    async with carrying() as (runtime, source):
        statistics = runtime.statistics()
        assert (statistics.carried, statistics.running) == (2, 0)
        assert statistics.admitted == statistics.finished + statistics.carried == 4
        assert statistics.replicas[0].in_flight == 0
        tokens = statistics.generated_tokens
        await anyio.sleep(100.0)
        assert runtime.statistics().generated_tokens == tokens
        second = await runtime.collect(source, 1, step=1, policy=ALONE)
        assert runtime.statistics().carried == 0
    assert [t.uid for t in second.trajectories] == ["p0", "p0"]
    for trajectory in second.trajectories:
        assert trajectory.outcome is Outcome.COMPLETED
        assert trajectory.metrics["generation_s"] < 14
        assert trajectory.metrics["total_s"] < 14
        assert trajectory.metrics["discarded_tokens"] == 0
    said = [t.transcript.ids_bytes() for t in second.trajectories]
    assert said == await alone("p0", "slow")


async def test_carried_trajectory_survives_sleep_and_new_weights_with_exact_versions() -> None:
    async with carrying() as (runtime, source):
        had = runtime.engines.tokens_under_way
        await runtime.sleep()
        await runtime.update_weights(version=5, source=DiskWeights("."))
        await runtime.wake_up()
        await anyio.sleep(10.0)
        assert runtime.engines.tokens_under_way == had
        batch = await runtime.collect(source, 1, step=1, policy=ALONE)
    sampled = list[tuple[int, int]]()
    for trajectory in batch.trajectories:
        runs = [run for span in trajectory.transcript.generated_spans() for run in span.versions]
        sampled += runs
        assert [version for version, _ in runs] == [0, 5]
        assert sum(n for _, n in runs) == trajectory.transcript.generated_length == 1001
    assert sum(n for version, n in sampled if version == 0) == had


class Shelf(Tool):
    name = "shelf"
    schema: ClassVar = {
        "type": "function",
        "function": {"name": "shelf", "description": "", "parameters": {"type": "object"}},
    }

    def __init__(self) -> None:
        self.open_sessions = 0

    async def open(self, context: Any) -> ToolSession:
        shelf = self
        shelf.open_sessions += 1

        class Session(ToolSession):
            async def execute(self, call: Any) -> str:
                return "put"

            async def close(self) -> None:
                shelf.open_sessions -= 1

        return Session()


#: Slow ones have their tools open before they are slow.
SHELVED = (
    Scenario(seed=1)
    .reply("slow", tool_call("shelf"), turn=1)
    .reply("slow", filler=1000)
    .reply("", filler=200)
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)


async def test_carried_trajectory_with_open_tools_ends_after_carry_s() -> None:
    shelf, given = Shelf(), {"scenario": SHELVED, "limits": LimitsConfig(carry_s=30.0)}
    async with carrying(shelf, agent=TOOL_AGENT, **given) as (runtime, source):
        assert (runtime.statistics().carried, shelf.open_sessions) == (2, 2)
        await anyio.sleep(29.0)
        assert (runtime.statistics().carried, shelf.open_sessions) == (2, 2)
        await anyio.sleep(2.0)
        assert (runtime.statistics().carried, shelf.open_sessions) == (0, 0)
        batch = await runtime.collect(source, 1, step=1)
    for trajectory in batch.trajectories:
        assert (trajectory.uid, trajectory.outcome) == ("p0", Outcome.DEADLINE)
        assert (trajectory.limit_source, trajectory.reason) == ("limits.carry_s", "carry")
        assert trajectory.transcript.generated_length > 20
        assert trajectory.metrics["total_s"] < 5.0  # the time between the calls is not in it


async def test_discard_carried_and_closing_the_runtime_end_them_cancelled() -> None:
    async with carrying() as (runtime, source):
        assert await runtime.discard_carried() == 2
        statistics = runtime.statistics()
        assert (statistics.carried, statistics.outcomes["cancelled"]) == (0, 2)
        assert statistics.admitted == statistics.finished
        batch = await runtime.collect(source, 1, step=1, policy=ALONE)
        assert batch.trajectories[0].uid == "p2"
        await runtime.collect(Counted({0: "slow"}), 1, step=2)
        assert runtime.statistics().carried == 2
    statistics = runtime.statistics()  # what closing it leaves
    assert (statistics.carried, statistics.outcomes["cancelled"]) == (0, 4)


async def test_stream_groups_left_carries_what_runs() -> None:
    source = Counted({0: "slow"})
    scheduling = SchedulingConfig(samples_per_prompt=2, max_in_flight=4, groups=CARRY)
    async with rollout.open_rollout(config(scheduling=scheduling)) as runtime:
        async with runtime.stream_groups(source, step=0) as groups:
            await anext(groups)
        assert runtime.statistics().carried >= 2
        batch = await runtime.collect(source, 1, step=1, policy=ALONE)
        assert [t.uid for t in batch.trajectories] == ["p0", "p0"]


@function_tool
async def nap() -> str:
    """Sleep."""
    await anyio.sleep(50.0)
    return "rested"


NAPPING = (
    Scenario(seed=1)
    .reply("slow", tool_call("nap"))
    .then("Done.")
    .reply("", filler=200)
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)


@pytest.mark.parametrize(
    ("group_s", "later_s", "outcome", "limit"),
    [
        (40.0, None, "completed", None),
        (60.0, 60.0, "completed", None),
        (None, 10.0, "deadline", "scheduling.groups.group_s"),
    ],
)
async def test_carried_agent_in_a_tool_is_under_the_deadlines_of_the_later_call(
    group_s: float | None, later_s: float | None, outcome: str, limit: str | None
) -> None:
    source = Counted({0: "slow"})
    async with rollout.open_rollout(config(NAPPING, agent=TOOL_AGENT), [nap]) as runtime:
        policy = GroupPolicy(surplus="carry", oversample=2.0, group_s=group_s)
        await runtime.collect(source, 1, step=0, policy=policy)
        await anyio.sleep(5.0)
        assert runtime.statistics().carried == 2
        policy = GroupPolicy(oversample=1.0, group_s=later_s)
        batch = await runtime.collect(source, 1, step=1, policy=policy)
    found = {(t.uid, str(t.outcome), t.limit_source) for t in batch.trajectories}
    assert found == {("p0", outcome, limit)}


@pytest.mark.parametrize("limit", ["turn_s", "trajectory_s"])
async def test_carried_agent_in_a_tool_its_turn_stands_still_and_its_time_is_afresh(
    limit: str,
) -> None:
    """It sleeps from 30 to 80, and is carried from 35 to 40."""
    call = tool_call("nap")
    scenario = (
        Scenario(seed=1)
        .reply("slow", call, filler=300 - len(call))
        .then("Done.")
        .reply("", filler=350)
        .timing(base_s=0.1, slope_s=0.0, prefill_tokens_per_s=1e9)
    )
    opened = config(scenario, 1, agent=TOOL_AGENT, limits=LimitsConfig(**{limit: 78.0}))
    async with rollout.open_rollout(opened, [nap]) as runtime:
        await runtime.collect([user("slow", uid="p0"), user("go", uid="p1")], 1, step=0)
        await anyio.sleep(5.0)
        assert runtime.statistics().carried == 1
        assert anyio.current_time() == pytest.approx(40.0, abs=0.5)
        batch = await runtime.collect([], 1, step=1)
        assert anyio.current_time() > 78.0
    assert [str(t.outcome) for t in batch.trajectories] == ["completed"]


async def test_carried_trajectory_of_a_dead_engine_continues_elsewhere() -> None:
    async with carrying(engine=SimulatedEngine(replicas=2)) as (runtime, source):
        await runtime.engines.remove_replica("engine-0")
        batch = await runtime.collect(source, 1, step=1, policy=ALONE)
    said = [t.transcript.ids_bytes() for t in batch.trajectories]
    assert said == await alone("p0", "slow")


async def test_carried_groups_of_one_uid_come_in_calls_of_their_own() -> None:
    def two() -> list[Prompt]:
        return [user("slow", uid="x"), user("go", uid="y")]

    async with rollout.open_rollout(config()) as runtime:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.collect, two(), 1)
            tasks.start_soon(runtime.collect, two(), 1)
        assert runtime.statistics().carried == 4
        more = [user("go", uid="x"), user("go", uid="z")]
        first = await runtime.collect(more, 2, policy=ALONE)
        second = await runtime.collect(more, 2, policy=ALONE)
        statistics = runtime.statistics()
    assert [t.uid for t in first.trajectories[::2]] == ["x", "x@2"]
    assert [t.uid for t in second.trajectories[::2]] == ["x", "z"]
    assert (statistics.outcomes["completed"], statistics.carried) == (12, 0)


async def test_stream_groups_carried_groups_that_are_too_old_begin_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lengths = Scenario(seed=2).reply("", filler={"median": 100, "sigma": 1.2, "max": 2000})
    source, version, oldest, taken = Counted(), 0, 0, []
    async with rollout.open_rollout(config(lengths)) as runtime:
        for step in range(3):
            batch = await runtime.collect(source, 4, step=step)
            taken += [t.uid for t in batch.trajectories[::2]]
            version += 1
            await runtime.update_weights(version=version, source=DiskWeights("."))
        async with runtime.stream_groups(source, max_staleness=1, groups_per_step=4) as groups:
            async for group in groups:
                taken.append(group.uid)
                assert group.min_version is not None
                oldest = max(oldest, version - group.min_version)
                if len(taken) % 4 == 0:
                    version += 1
                    await runtime.update_weights(version=version, source=DiskWeights("."))
                if len(taken) == 32:
                    break
            restarted = groups.metrics()["groups/restarted"]
        assert oldest == 1
        assert restarted > 0
        assert caplog.text.count("older than max_staleness allows") == 1
        taken += [t.uid for t in (await runtime.collect(source, 8, step=9)).trajectories[::2]]
        await runtime.discard_carried()
        statistics = runtime.statistics()
    assert statistics.admitted == statistics.finished
    assert len(taken) == len(set(taken)) == 40  # no prompt was lost, and none came twice
    assert source.count <= 40 + 16


async def test_stream_groups_finished_groups_that_are_too_old_begin_again() -> None:
    source = Counted()
    scheduling = SchedulingConfig(samples_per_prompt=2, max_in_flight=16)
    async with rollout.open_rollout(config(scheduling=scheduling)) as runtime:
        async with runtime.stream_groups(source) as groups:
            taken = [(await anext(groups)).uid]
            await anyio.sleep(100.0)  # others have ended, and are not taken
        for version in range(1, 4):
            await runtime.update_weights(version=version, source=DiskWeights("."))
        had = source.count
        async with runtime.stream_groups(source, max_staleness=2, groups_per_step=2) as groups:
            found = [await anext(groups) for _ in range(2)]
            assert groups.metrics()["groups/restarted"] >= 2
        assert [group.min_version for group in found] == [3, 3]
        taken += [group.uid for group in found]
        rest = await runtime.collect(source, had - 3, policy=ALONE)
        taken += [t.uid for t in rest.trajectories[::2]]
    assert len(taken) == had
    assert set(taken) == {f"p{at}" for at in range(had)}


@asynccontextmanager
async def crowded() -> AsyncIterator[tuple[Any, Counted]]:
    """A runtime that carries both members of p0, and whose places another call has."""
    scheduling = SchedulingConfig(samples_per_prompt=2, groups=CARRY, max_in_flight=4)
    async with (
        carrying(scheduling=scheduling) as (runtime, source),
        anyio.create_task_group() as tasks,
    ):
        busy = [user("slow", uid="a"), user("slow", uid="b")]
        tasks.start_soon(lambda: runtime.generate(busy, step=1))
        await anyio.sleep(1.0)
        yield runtime, source
        runtime.cancel(reason="over")


async def test_carried_members_that_get_no_place_are_cancelled_once_with_their_tokens() -> None:
    async def cancel() -> None:
        await anyio.sleep(2.0)
        assert runtime.cancel("p0", reason="enough") == 2

    async with crowded() as (runtime, source), anyio.create_task_group() as tasks:
        tasks.start_soon(cancel)
        batch = await runtime.collect(source, 1, step=2, policy=ALONE)
        ends = [(t.uid, t.member, t.outcome, t.reason) for t in batch.trajectories]
        assert ends == [("p0", member, Outcome.CANCELLED, "enough") for member in (0, 1)]
        assert all(t.transcript.generated_length > 0 for t in batch.trajectories)
    statistics = runtime.statistics()
    assert statistics.admitted == statistics.finished == 8


@pytest.mark.parametrize(("surplus", "left"), [("cancel", (0, 2)), ("carry", (2, 0))])
async def test_carried_members_that_got_no_place_end_with_their_call_as_surplus_says(
    surplus: Any, left: tuple[int, int]
) -> None:
    async with crowded() as (runtime, source):
        with anyio.move_on_after(2.0):
            policy = GroupPolicy(oversample=1.0, surplus=surplus)
            await runtime.collect(source, 1, step=2, policy=policy)
        statistics = runtime.statistics()
        assert (statistics.carried, statistics.outcomes.get("cancelled", 0)) == left


async def test_cancel_between_calls_ends_the_carried_members_that_it_names() -> None:
    async with carrying() as (runtime, source):
        assert runtime.cancel("p0", 7) == runtime.cancel("p1") == 0
        assert runtime.cancel("p0", 1, reason="not wanted") == 1
        assert runtime.cancel("p0", 1) == 0
        await anyio.sleep(1.0)
        statistics = runtime.statistics()
        assert (statistics.carried, statistics.outcomes["cancelled"]) == (1, 1)
        batch = await runtime.collect(source, 1, step=1, policy=ALONE)
        ended = [(t.uid, t.member, str(t.outcome), t.reason) for t in batch.trajectories]
        assert ended == [("p0", 0, "completed", ""), ("p0", 1, "cancelled", "not wanted")]
        assert batch.trajectories[1].transcript.generated_length > 0
        assert runtime.statistics().carried == 0


async def test_explain_says_since_when_a_trajectory_is_carried() -> None:
    async with carrying() as (runtime, _):
        await anyio.sleep(100.0)
        carried = runtime.explain().carried
        waits = [(each.uid, w.kind, round(w.seconds)) for each in carried for w in each.waits]
        assert waits == [("p0", "held", 100)] * 2
