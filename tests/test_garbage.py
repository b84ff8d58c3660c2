"""Trajectories leave nothing for Python's garbage collector: what ends is freed at once."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

import rollout
from rollout import Group, Prompt, RolloutRuntime, Trajectory, function_tool
from rollout.agents import AgentContext, AgentLoop
from rollout.config import LimitsConfig, RewardsConfig, SchedulingConfig
from rollout.testing import Scenario, tool_call

MEMBERS = 16


@function_tool
async def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b


@function_tool
async def nap() -> str:
    """Sleep."""
    await anyio.sleep(30)
    return "rested"


@function_tool
async def fail() -> str:
    """Fail."""
    raise RuntimeError("out of order")


@pytest.fixture(scope="module", autouse=True)
def _agents() -> None:
    @rollout.register_agent("garbage_broken")
    class _Broken(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            await context.generate()
            raise RuntimeError("a bug")

    @rollout.register_agent("garbage_branching")
    class _Branching(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            await context.generate()
            branch = await context.main.branch(len(context.transcript))
            branch.observe([{"role": "user", "content": "otherwise?"}])
            await branch.generate()


async def reward(trajectory: Trajectory) -> float:
    if "<bad reward>" in str(trajectory.messages[0].content):
        raise ValueError("no reward")
    return 1.0


SCENARIO = (
    Scenario(seed=1)
    .reply("<add>", tool_call("add", a=1, b=2))
    .then(tool_call("add", a=3, b=4))
    .then("7")
    .reply("<nap>", tool_call("nap"))
    .then("That took long.")
    .reply("<fail>", tool_call("fail"))
    .then("A pity.")
    .reply("<torn>", "<tool_call>{</tool_call>")
    .then("Well.")
    .reply("<long>", filler=3000, finish="length")
    .reply("", "Hello.")
    .timing(base_s=0.5)
)


@pytest.fixture
def _collector_off() -> Iterator[None]:
    yield
    gc.set_debug(0)
    gc.unfreeze()
    gc.garbage.clear()
    gc.enable()


def prompts(kind: str, content: Any = None, **fields: Any) -> list[Prompt]:
    content = f"<{kind}>" if content is None else content
    message = {"role": "user", "content": content}
    return [Prompt(messages=[message], **fields) for _ in range(MEMBERS)]


async def garbage_of(runtime: RolloutRuntime, given: list[Prompt], stop: str = "") -> Counter[str]:
    """What the trajectories of a second call left to the collector, by type."""
    await _run(runtime, given, stop)
    await anyio.sleep(100)  # timers of what has ended
    gc.collect()
    gc.freeze()  # what other tests of this process leave now is not this call's
    gc.disable()
    await _run(runtime, given, stop)
    await anyio.sleep(100)
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = Counter(type(each).__qualname__ for each in gc.garbage)
    found["dict"] -= found["LP_c_ubyte"]  # pointers that libraries make by ctypes, and theirs
    del found["LP_c_ubyte"]
    return found


async def _run(runtime: RolloutRuntime, given: list[Prompt], stop: str) -> None:
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            if stop:
                tasks.start_soon(_stop, runtime, scope, stop)
            await runtime.generate(given)


async def _stop(runtime: RolloutRuntime, scope: anyio.CancelScope, how: str) -> None:
    await anyio.sleep(0.25)
    if how == "caller":
        scope.cancel()
    else:
        runtime.cancel()


@pytest.mark.anyio
@pytest.mark.usefixtures("_collector_off")
@pytest.mark.parametrize(
    ("given", "stop"),
    [
        pytest.param(prompts("chat"), "", id="one turn"),
        pytest.param(prompts("add"), "", id="tools"),
        pytest.param(prompts("nap"), "", id="tool at its deadline"),
        pytest.param(prompts("fail"), "", id="tool that fails"),
        pytest.param(prompts("torn"), "", id="invalid call"),
        pytest.param(prompts("long"), "", id="length"),
        pytest.param(prompts("chat"), "cancel", id="cancelled"),
        pytest.param(prompts("chat"), "caller", id="cancelled by the caller"),
        pytest.param(prompts("reject", content=3), "", id="rejected"),
        pytest.param(prompts("chat", agent_name="garbage_broken"), "", id="agent that raises"),
        pytest.param(prompts("chat", agent_name="garbage_branching"), "", id="branches"),
        pytest.param(prompts("bad reward"), "", id="reward that raises"),
    ],
)
async def test_trajectory_that_has_ended_leaves_nothing_for_the_collector(
    given: list[Prompt], stop: str
) -> None:
    config = SCENARIO.config(
        scheduling=SchedulingConfig(max_failures=None, freeze_heap=False),
        limits=LimitsConfig(tool_s=5.0),
    )
    async with rollout.open_rollout(config, [add, nap, fail], reward) as runtime:
        found = await garbage_of(runtime, given, stop)
    assert found.total() < MEMBERS, found.most_common(20)


@pytest.mark.anyio
@pytest.mark.usefixtures("_collector_off")
@pytest.mark.parametrize("kind", ["chat", "bad reward"])
async def test_group_that_has_ended_leaves_nothing_for_the_collector(kind: str) -> None:
    async def group_reward(group: Group) -> list[float]:
        if "<bad reward>" in str(group.trajectories[0].messages[0].content):
            raise ValueError("no reward")
        return [1.0] * len(group.trajectories)

    config = SCENARIO.config(
        scheduling=SchedulingConfig(max_failures=None, freeze_heap=False, samples_per_prompt=2),
        rewards=RewardsConfig(retries=1),
    )
    async with rollout.open_rollout(config, group_reward=group_reward) as runtime:
        found = await garbage_of(runtime, prompts(kind))
    assert found.total() < MEMBERS, found.most_common(20)
