"""Situations for the race harness: what a trainer does, small enough to be cut at every step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import anyio

import rollout
from harness.recorder import Recorder
from rollout import (
    AgentLoop,
    EnvironmentAgent,
    Group,
    GroupPolicy,
    Prompt,
    Trajectory,
    function_tool,
    register_agent,
)
from rollout.agents import AgentContext, ToolAgent
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    LimitsConfig,
    RewardsConfig,
    SamplingConfig,
    SchedulingConfig,
    SimulatedEngine,
)
from rollout.engine import DiskWeights
from rollout.interactions import ScriptedUser
from rollout.testing import Scenario, tool_call

LENGTHS = LengthsConfig(prompt=1200, response=600)


def user(text: str, **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


@function_tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    await anyio.sleep(0.05)
    return a + b


@function_tool
async def nap(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    await anyio.sleep(seconds)
    return "rested"


async def length_reward(trajectory: Trajectory) -> float:
    await anyio.sleep(0.02)
    return float(trajectory.transcript.generated_length)


async def single_turn(recorder: Recorder) -> None:
    config = (
        Scenario(seed=1)
        .reply("", filler=40)
        .config(
            agent=AgentConfig(name="single_turn"),
            scheduling=SchedulingConfig(samples_per_prompt=3, max_in_flight=2),
            engine=SimulatedEngine(replicas=2),
            lengths=LENGTHS,
            sampling=SamplingConfig(max_new_tokens=32),
        )
    )
    async with recorder.open_rollout(config, reward=length_reward) as runtime:
        await runtime.generate([user("one"), user("two")])


async def tool_agent(recorder: Recorder) -> None:
    calls = tool_call("add", a=2, b=3) + tool_call("nap", seconds=0.2) + tool_call("add", a=1, b=1)
    config = (
        Scenario(seed=2)
        .reply("sum", calls)
        .then("The sum is 5.")
        .fault(duplicate_answers=0.3)
        .config(
            scheduling=SchedulingConfig(samples_per_prompt=2),
            engine=SimulatedEngine(replicas=2),
            lengths=LENGTHS,
        )
    )
    async with recorder.open_rollout(config, [add, nap], length_reward) as runtime:
        await runtime.generate([user("a sum")])


async def scripted_user(recorder: Recorder) -> None:
    config = (
        Scenario(seed=3)
        .reply("start", "First answer.", filler=20)
        .then("Second answer.")
        .config(
            scheduling=SchedulingConfig(samples_per_prompt=2),
            agent=AgentConfig(interaction="critic"),
            lengths=LENGTHS,
        )
    )
    critic = ScriptedUser(["Try again."], name="critic", scores=[0.5])
    async with recorder.open_rollout(config, interactions=[critic]) as runtime:
        await runtime.generate([user("start")])


async def slow_consumer(recorder: Recorder) -> None:
    config = (
        Scenario(seed=4)
        .reply("", filler=20)
        .config(
            scheduling=SchedulingConfig(samples_per_prompt=22, max_in_flight=3),
            lengths=LENGTHS,
        )
    )
    async with recorder.open_rollout(config) as runtime:
        async with runtime.stream([user("go")]) as trajectories:
            async for _ in trajectories:
                await anyio.sleep(0.6)  # so that the buffer is full for a while


async def ranked(group: Group) -> list[float | None]:
    """The group's rewards, after a while; none of the longest."""
    await anyio.sleep(0.3)
    lengths = [len(each.answer) for each in group.trajectories]
    return [None if length == max(lengths) else -float(length) for length in lengths]


async def ranked_groups(recorder: Recorder) -> None:
    config = (
        Scenario(seed=12)
        .reply("", "", filler={"median": 20, "sigma": 0.8, "max": 60})
        .config(
            scheduling=SchedulingConfig(samples_per_prompt=3, max_in_flight=4),
            limits=LimitsConfig(reward_s=1.0),
            rewards=RewardsConfig(retries=1, backoff_s=0.1),
            lengths=LENGTHS,
        )
    )
    async with recorder.open_rollout(config, reward=length_reward, group_reward=ranked) as runtime:
        async with runtime.stream([user("one"), user("two"), user("three")]) as trajectories:
            await anyio.sleep(0.5)
            runtime.cancel("prompt-1", 0, reason="enough")
            async for _ in trajectories:
                pass


async def leaving_consumer(recorder: Recorder) -> None:
    config = (
        Scenario(seed=5)
        .reply("quick", "ok")
        .reply("slow", tool_call("nap", seconds=5.0), filler=100)
        .config(
            scheduling=SchedulingConfig(samples_per_prompt=2),
            engine=SimulatedEngine(replicas=2),
            lengths=LENGTHS,
        )
    )
    async with recorder.open_rollout(config, [nap]) as runtime:
        prompts = [user("slow", uid="slow"), user("quick", uid="quick")]
        async with runtime.stream(prompts) as trajectories:
            async for _ in trajectories:
                break
        await runtime.generate([user("quick")])


async def close_during_start(recorder: Recorder) -> None:
    config = (
        Scenario(seed=6)
        .reply("", "ok")
        .fault(start_delay_s=2.0, replicas=(1,))
        .config(engine=SimulatedEngine(replicas=3), lengths=LENGTHS)
    )
    with anyio.move_on_after(1.0):
        async with recorder.open_rollout(config) as runtime:
            await runtime.generate([user("never")])
    async with anyio.create_task_group() as tasks:
        async with recorder.open_rollout(
            Scenario(seed=6).reply("", filler=60).config(lengths=LENGTHS)
        ) as runtime:
            tasks.start_soon(_generate_until_closed, runtime)
            await anyio.sleep(0.3)


async def _generate_until_closed(runtime: Any) -> None:
    try:
        await runtime.generate([user("go"), user("on")])
    except rollout.RolloutError:
        return


async def changing_replicas(recorder: Recorder) -> None:
    """Replicas come and go, and weights change, in the middle of a batch."""
    config = (
        Scenario(seed=7)
        .reply("", filler=60)
        .timing(load_weights_s=0.15)
        .config(
            agent=AgentConfig(name="single_turn"),
            scheduling=SchedulingConfig(samples_per_prompt=3),
            engine=SimulatedEngine(replicas=2),
            lengths=LENGTHS,
        )
    )
    async with recorder.open_rollout(config) as runtime:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_change_fleet, runtime)
            await runtime.generate([user("one"), user("two")])
            await runtime.generate([user("three")])


async def _change_fleet(runtime: Any) -> None:
    engines = runtime.engines
    with suppress(rollout.RolloutError):
        await anyio.sleep(0.1)
        await engines.add_replica()
        engines.drain("engine-0")
        await runtime.update_weights(version=1, source=DiskWeights("."))
        await engines.remove_replica("engine-1", drain_s=0.1)
        engines.resume("engine-0")
        await engines.add_replica()


@register_agent("tree")
class Tree(AgentLoop):
    """A turn; two branches and a sub-agent at once; another turn."""

    async def run(self, context: AgentContext) -> None:
        turn = await context.generate()
        if turn.cut_by is not None:
            return
        first = await context.branch()
        second = await context.branch(context.transcript.prompt_length, purpose="retry")
        worker = await context.subagent(RESEARCH)
        first.reward, worker.trainable = 0.25, False

        async def ask() -> None:
            first.observe([{"role": "user", "content": "another way"}])
            await first.generate()

        async def research() -> None:
            turn = await worker.generate()
            if turn.calls:
                await worker.call_tools(turn.calls)
                await worker.generate()

        async with anyio.create_task_group() as tasks:
            for work in (ask, second.generate, research):
                tasks.start_soon(work)
        said = f"the sub-agent says: {worker.messages[-1].content}"
        context.observe([{"role": "user", "content": said}])
        await context.generate()


RESEARCH = [
    {"role": "system", "content": "You are a researcher."},
    {"role": "user", "content": "?"},
]


async def tree(recorder: Recorder) -> None:
    config = (
        Scenario(seed=8)
        .reply("another way", "Or so.", filler=10)
        .reply("researcher", tool_call("add", a=2, b=3))
        .then("Found: 5.")
        .reply("question", "An answer.", filler=5)
        .then("The end.")
        .config(
            agent=AgentConfig(name="tree"),
            engine=SimulatedEngine(replicas=2),
            lengths=LENGTHS,
        )
    )
    async with recorder.open_rollout(config, [add], length_reward) as runtime:
        await runtime.generate([user("question")])


@register_agent("delegates")
class Delegates(AgentLoop):
    """Two sub-agents at once, then notes in place of what was said, and a last turn."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()

        async def research(name: str, ready: anyio.Event) -> None:
            async with context.open_segment(RESEARCH, name, ["add"]) as child:
                ready.set()
                await ToolAgent().run(child)
                child.reward = 0.5

        async with anyio.create_task_group() as tasks:
            for name in ("first", "second"):
                ready = anyio.Event()
                tasks.start_soon(research, name, ready)
                await ready.wait()
        await context.compact([{"role": "user", "content": "question, in short"}])
        await context.generate()
        context.reward_turn(0.25)


async def delegates(recorder: Recorder) -> None:
    config = (
        Scenario(seed=9)
        .reply("researcher", tool_call("add", a=2, b=3))
        .then("Found: 5.")
        .reply("question", "An answer.", filler=5)
        .config(agent=AgentConfig(name="delegates"), lengths=LENGTHS)
    )
    async with recorder.open_rollout(config, [add], length_reward) as runtime:
        await runtime.generate([user("question")])


class Counting:
    """An environment that takes a moment for everything."""

    async def reset(self, prompt: Prompt) -> str:
        self.steps = 0
        await anyio.sleep(0.05)
        return "start"

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, int]]:
        await anyio.sleep(0.05)
        self.steps += 1
        return "again", 0.5, self.steps == 3, {"steps": self.steps}

    async def close(self) -> None:
        await anyio.sleep(0.05)


register_agent("counting")(EnvironmentAgent(Counting))


async def environment(recorder: Recorder) -> None:
    config = (
        Scenario(seed=10)
        .reply("start", "One more.", filler=10)
        .config(
            agent=AgentConfig(name="counting"),
            scheduling=SchedulingConfig(samples_per_prompt=2),
            lengths=LENGTHS,
        )
    )
    async with recorder.open_rollout(config) as runtime:
        await runtime.generate([user("play")])


def loader(*texts: str) -> Iterator[Prompt]:
    for index, text in enumerate(texts):
        yield user(text, uid=f"g{index}")


def group_config(seed: int, **policy: Any) -> Any:
    return (
        Scenario(seed=seed)
        .reply("long", filler=60)
        .reply("sum", tool_call("add", a=2, b=3))
        .then("The sum is 5.")
        .reply("", filler=10)
        .timing(load_weights_s=0.1)
        .config(
            scheduling=SchedulingConfig(
                samples_per_prompt=2, max_in_flight=5, groups=GroupPolicy(**policy)
            ),
            engine=SimulatedEngine(replicas=2),
            lengths=LENGTHS,
        )
    )


async def collected_groups(recorder: Recorder) -> None:
    """Two steps; the surplus of the first is cancelled, and its prompt starts again."""
    config = group_config(11, oversample=1.5, refill_failed=True)
    source = loader("long", "a sum", "go", "go")
    async with recorder.open_rollout(config, [add], length_reward) as runtime:
        await runtime.collect(source, 2)
        await runtime.collect(source, 2, policy=GroupPolicy(oversample=1.0, members=1))


async def carried_groups(recorder: Recorder) -> None:
    """What is unfinished sleeps, gets other weights, and continues."""
    config = group_config(12, oversample=2.0, surplus="carry")
    source = loader("long", "a sum", "go", "go", "long")
    async with recorder.open_rollout(config, [add], length_reward) as runtime:
        await runtime.collect(source, 1)
        await runtime.sleep()
        await runtime.update_weights(version=1, source=DiskWeights("."))
        await runtime.wake_up()
        await runtime.collect(source, 2)
        await runtime.discard_carried()


async def streamed_groups(recorder: Recorder) -> None:
    """A consumer that trains while others generate, and leaves."""
    config = group_config(13, surplus="carry")
    source = loader(*["long", "a sum", "go"] * 3)
    async with recorder.open_rollout(config, [add]) as runtime:
        taken = 0
        async with runtime.stream_groups(source, max_staleness=1, groups_per_step=2) as groups:
            async for _ in groups:
                taken += 1
                if taken % 2 == 0:
                    await runtime.update_weights(version=taken, source=DiskWeights("."))
                if taken == 4:
                    break


SITUATIONS: dict[str, Callable[[Recorder], Awaitable[None]]] = {
    "single turn": single_turn,
    "tool agent with parallel calls": tool_agent,
    "scripted user": scripted_user,
    "slow consumer": slow_consumer,
    "rewards of groups": ranked_groups,
    "consumer that leaves": leaving_consumer,
    "close during start-up": close_during_start,
    "changing replicas": changing_replicas,
    "tree of conversations": tree,
    "sub-agents and compaction": delegates,
    "environment": environment,
    "groups collected": collected_groups,
    "groups carried": carried_groups,
    "groups streamed": streamed_groups,
}
