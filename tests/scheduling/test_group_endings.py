"""What ends in a call of groups when that has what it wants, and between two calls."""

from __future__ import annotations

from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import attrs
import pytest
from test_group_choices import config, source, uids
from test_groups import Counted, user

import rollout
from rollout import GroupPolicy, Outcome
from rollout.agents import AgentContext, AgentLoop
from rollout.errors import LimitExceeded, RolloutError

pytestmark = pytest.mark.anyio


@rollout.register_agent("ends_badly")
class EndsBadly(AgentLoop):
    """Prompts below p20 raise when they are cancelled; the others generate after a second."""

    async def run(self, context: AgentContext) -> None:
        if int(str(context.prompt.uid)[1:]) < 20:
            try:
                await anyio.sleep(1000.0)
            finally:
                raise RuntimeError("the sandbox is torn")
        await anyio.sleep(1.0)
        await context.generate()


async def test_collect_surplus_that_fails_when_it_is_cancelled_does_not_end_the_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rollout.open_rollout(config(agent="ends_badly")) as runtime:
        batch = await runtime.collect(source(), 10, policy=GroupPolicy(oversample=3.0))
        assert runtime.statistics().outcomes == {"completed": 10, "failed": 20}
    assert uids(batch) == [f"p{at}" for at in range(20, 30)]
    assert "the sandbox is torn" in caplog.text


@rollout.register_agent("fails_first_and_some_always")
class FailsFirst(AgentLoop):
    """Raises in the first attempt at each prompt, and of p30 and above in all of them."""

    begun: ClassVar[set[str]] = set()

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        uid = str(context.prompt.uid)
        if int(uid[1:]) >= 30 or uid not in self.begun:
            self.begun.add(uid)
            raise RuntimeError("the sandbox is gone")


async def test_collect_members_that_are_restarted_cost_no_budget_of_failures() -> None:
    FailsFirst.begun.clear()
    policy = GroupPolicy(refill_failed=True)
    async with rollout.open_rollout(config(agent="fails_first_and_some_always")) as runtime:
        batch = await runtime.collect(prompts := source(), 31, policy=policy)
        assert runtime.statistics().outcomes == {"completed": 30, "failed": 1}
        assert [t.uid for t in batch.trajectories if t.outcome is Outcome.FAILED] == ["p30"]
        assert batch.metrics["groups/refilled"] == 32
        with pytest.raises(LimitExceeded, match=r"17 of 17 .*\n.*17 × RuntimeError: the sandbox"):
            await runtime.collect(prompts, 40, policy=policy)


async def test_members_that_fail_when_their_time_is_over_are_not_run_again() -> None:
    policy = GroupPolicy(refill_failed=True, group_s=10.0)
    async with rollout.open_rollout(config(agent="ends_badly")) as runtime:
        batch = await runtime.collect(source(), 1, policy=policy)
    assert [(t.outcome, t.metrics["attempts"]) for t in batch.trajectories] == [("failed", 1)]
    assert batch.metrics["groups/refilled"] == 0


async def test_members_that_end_while_they_are_carried_are_in_metrics_of_the_next_call() -> None:
    @rollout.register_agent("rests")
    class Rests(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            await context.generate()
            if context.prompt.uid == "p0":
                await anyio.sleep(50.0)

    prompts = Counted({})
    opened = config(members=2, agent="rests")
    async with rollout.open_rollout(opened, reward=lambda _: 1.0) as runtime:
        policy = GroupPolicy(oversample=2.0, surplus="carry")
        await runtime.collect(prompts, 1, policy=policy)
        await anyio.sleep(100.0)
        assert runtime.statistics().carried == 0
        batch = await runtime.collect(prompts, 1)
    assert uids(batch) == ["p0", "p0"]
    metrics: dict[str, Any] = batch.metrics
    lengths = [t.transcript.generated_length for t in batch.trajectories]
    assert metrics["selection/length/finished"] == sum(lengths) / 2
    assert metrics["selection/reward/finished"] == 1.0
    assert metrics["selection/length_bias"] == 1.0


async def test_stream_that_is_left_tells_a_task_that_waits_for_a_group() -> None:
    async def take(groups: Any) -> None:
        assert [group async for group in groups] == []
        ended.set()

    ended = anyio.Event()
    async with rollout.open_rollout(config()) as runtime, anyio.create_task_group() as tasks:
        async with runtime.stream_groups([user("slow", uid="p0")]) as groups:
            tasks.start_soon(take, groups)
            await anyio.sleep(1.0)
        with anyio.fail_after(1.0):
            await ended.wait()


@pytest.mark.parametrize(
    ("call", "sleeps"), [("stream", False), ("stream_groups", False), ("collect", True)]
)
async def test_call_that_begins_as_the_runtime_is_closed_learns_it(call: str, sleeps: bool) -> None:
    async def begin(runtime: Any, said: list[str]) -> None:
        prompts = [user("slow", uid="p0")]
        try:
            if call == "collect":
                await runtime.collect(prompts, 1)
            else:
                async with getattr(runtime, call)(prompts) as found:
                    assert [each async for each in found] == []
        except RolloutError as error:
            said.append(str(error))

    opened = config()
    if sleeps:
        opened = attrs.evolve(
            opened, engine=attrs.evolve(opened.engine, sleep_between_batches=True)
        )
    for rounds in range(20 if sleeps else 12):
        said: list[str] = []
        with anyio.fail_after(1000.0):
            async with anyio.create_task_group() as tasks:
                async with rollout.open_rollout(opened) as runtime:
                    tasks.start_soon(begin, runtime, said)
                    for _ in range(rounds):
                        await anyio.lowlevel.checkpoint()
        assert len(said) == 1
        assert "closed" in said[0]
