"""What ends in a call of groups when that has what it wants, and between two calls."""

from __future__ import annotations

from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import attrs
import pytest
import trio
from test_group_choices import config, source, uids
from test_groups import Counted, user
from trio.testing import MockClock

import rollout
from rollout import Group, GroupPolicy, Outcome, ToolCall
from rollout.agents import AgentContext, AgentLoop
from rollout.errors import EngineError, LimitExceeded, RolloutError, SourceEnded
from rollout.tools import Tool, ToolContext, ToolSession

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


@rollout.register_agent("others_are_torn")
class OthersAreTorn(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        if context.identity.member:
            try:
                await anyio.sleep(1000.0)
            finally:
                raise RuntimeError("the sandbox is torn")
        await context.generate()


async def test_collect_surplus_members_that_fail_cost_no_budget_of_failures() -> None:
    opened = config(members=4, agent="others_are_torn", scheduling={"max_in_flight": 8})
    async with rollout.open_rollout(opened) as runtime:
        batch = await runtime.collect(source(), 40, policy=GroupPolicy(members=1))
        assert runtime.statistics().outcomes["failed"] > 16
    assert {str(t.outcome) for t in batch.trajectories} == {"completed"}


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


@pytest.mark.parametrize("what", ["refuses", "raises"])
async def test_collect_that_has_its_groups_is_not_ended_by_what_accept_says_of_others(
    what: str,
) -> None:
    judged: list[str] = []

    def accept(group: Group) -> bool:
        judged.append(group.uid)
        if len(judged) > 1 and what == "raises":
            raise LookupError("the judge is gone")
        return len(judged) == 1

    policy = GroupPolicy(oversample=2.0, max_refused=0, accept=accept)
    async with rollout.open_rollout(config()) as runtime:
        prompts = [user("go", uid="p0"), user("go", uid="p1")]
        assert uids(await runtime.collect(prompts, 1, policy=policy)) == judged[:1]
    assert len(judged) == 2


@rollout.register_agent("interrupts")
class Interrupts(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        try:
            await context.generate()
        except BaseException:
            if context.prompt.uid == "p0":
                raise KeyboardInterrupt from None
            raise


def test_interrupt_of_a_surplus_member_passes_to_the_caller() -> None:
    async def act() -> None:
        async with rollout.open_rollout(config(agent="interrupts")) as runtime:
            prompts = [user("slow", uid="p0"), user("go", uid="p1")]
            await runtime.collect(prompts, 1, policy=GroupPolicy(oversample=2.0))

    with pytest.raises(KeyboardInterrupt):
        trio.run(act, clock=MockClock(autojump_threshold=0))


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


async def test_stream_that_is_asked_once_it_is_left_does_not_tell_its_source_the_end() -> None:
    prompts = [user("go", uid=f"p{at}") for at in range(3)]
    async with rollout.open_rollout(config()) as runtime:
        async with runtime.stream_groups(prompts) as groups:
            found = [(await anext(groups)).uid]
        assert await groups.receive() is None
        for _ in range(2):
            found += uids(await runtime.collect(prompts, 1))
        assert sorted(found) == ["p0", "p1", "p2"]
        with pytest.raises(SourceEnded):
            await runtime.collect(prompts, 1)


@pytest.mark.parametrize("surplus", ["cancel", "carry"])
async def test_stream_that_is_left_tells_a_task_that_waits_for_a_group(surplus: str) -> None:
    async def take(groups: Any) -> None:
        assert [group async for group in groups] == []
        ended.set()

    ended, policy = anyio.Event(), GroupPolicy(surplus=surplus)
    async with rollout.open_rollout(config()) as runtime, anyio.create_task_group() as tasks:
        async with runtime.stream_groups([user("slow", uid="p0")], policy=policy) as groups:
            tasks.start_soon(take, groups)
            await anyio.sleep(1.0)
        with anyio.fail_after(1.0):
            await ended.wait()


@pytest.mark.parametrize(
    ("call", "sleeps", "moments"),
    [
        ("generate", False, 12),
        ("stream", False, 12),
        ("collect", False, 12),
        ("stream_groups", False, 12),
        ("generate", True, 20),
        ("collect", True, 20),
    ],
)
async def test_call_that_begins_as_the_runtime_is_closed_learns_it(
    call: str, sleeps: bool, moments: int
) -> None:
    async def begin(runtime: Any, said: list[str]) -> None:
        prompts = [user("slow", uid="p0")]
        try:
            if call in ("generate", "collect"):
                await getattr(runtime, call)(prompts, *([1] if call == "collect" else []))
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
    for rounds in range(moments):
        said: list[str] = []
        with anyio.fail_after(1000.0):
            async with anyio.create_task_group() as tasks:
                async with rollout.open_rollout(opened) as runtime:
                    tasks.start_soon(begin, runtime, said)
                    for _ in range(rounds):
                        await anyio.lowlevel.checkpoint()
        assert len(said) == 1
        assert "closed" in said[0]


class ClosesSlowly(Tool):
    """Its session takes long to close."""

    name = "slow_close"
    schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {"name": "slow_close", "parameters": {"type": "object", "properties": {}}},
    }

    async def open(self, context: ToolContext) -> ToolSession:
        class Session(ToolSession):
            async def execute(self, call: ToolCall) -> str:
                return "done"

            async def close(self) -> None:
                await anyio.sleep(4.0)

        return Session()


async def test_agent_that_runs_again_after_its_groups_deadline_ends_at_once() -> None:
    attempts: list[float] = []

    @rollout.register_agent("loses_its_engine")
    class LosesItsEngine(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            attempts.append(anyio.current_time())
            await context.generate()
            if len(attempts) == 1:
                await context.call_tools([ToolCall(name="slow_close", arguments={}, id="1")])
                await anyio.sleep_until(attempts[0] + 98.0)
                raise EngineError("the engine is gone")
            await anyio.sleep(1000.0)

    opened = config(members=1, agent="loses_its_engine")
    still = attrs.evolve(opened.scheduling, adaptive_admission=False)  # nothing else happens
    opened = attrs.evolve(opened, scheduling=still)
    async with rollout.open_rollout(opened, [ClosesSlowly()]) as runtime:
        policy, began = GroupPolicy(group_s=100.0), anyio.current_time()
        batch = await runtime.collect([user("go", uid="p0")], 1, policy=policy)
        assert anyio.current_time() - began < 103.0
    assert len(attempts) == 2
    (ended,) = batch.trajectories
    assert (ended.outcome, ended.limit_source) == ("deadline", "scheduling.groups.group_s")
