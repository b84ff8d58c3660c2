"""A context after its trajectory has ended, as a task has it that the agent left behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

import rollout
from race_situations import user
from rollout import AgentContext, AgentError, AgentLoop, Outcome, Trajectory, register_agent
from rollout.config import AgentConfig
from rollout.testing import Scenario
from rollout.tools import ToolPolicy, function_tool
from trial_agent import run_trial

pytestmark = pytest.mark.anyio

SAID = [{"role": "user", "content": "Go on."}]
SCENARIO = Scenario(seed=1).reply("", "Hello there.", filler=20).timing(base_s=0.01, slope_s=0.002)
AGENTS: dict[str, Callable[[AgentContext], Awaitable[Any]]] = {}


@register_agent("first_and_second")
class FirstAndSecond(AgentLoop):
    """Does what the test says for its prompt."""

    async def run(self, context: AgentContext) -> None:
        await AGENTS[context.identity.uid](context)


@function_tool(policy=ToolPolicy(breaker_failures=1))
async def look() -> str:
    """Look around."""
    await anyio.sleep(0.3)
    return "all is fine"


async def run_two(first: Any, second: Any, scenario: Scenario = SCENARIO) -> Trajectory:
    """Run two agents at once; the trajectory of the first one, after both."""
    AGENTS.update(first=first, second=second)
    config = scenario.config(agent=AgentConfig(name="first_and_second"))
    async with rollout.open_rollout(config, tools=[look]) as runtime:
        batch = await runtime.generate([user("a", uid="first"), user("b", uid="second")])
        assert runtime.engines.tokens_under_way == 0
    return batch.trajectories[0]


async def observe(context: AgentContext) -> None:
    context.observe(SAID)


async def test_context_of_an_ended_trajectory_refuses_all_that_would_change_it() -> None:
    contexts: list[AgentContext] = []
    refused: list[str] = []

    async def first(context: AgentContext) -> None:
        contexts.append(context)
        await context.generate()

    async def second(context: AgentContext) -> None:
        await context.generate()
        await anyio.sleep(0.5)
        old = contexts[0]
        for act in (
            *(old.generate, old.branch, lambda: old.subagent(SAID), lambda: old.compact(SAID)),
            *(lambda: observe(old), lambda: old.answer(SAID), lambda: old.run_tools([])),
            *(lambda: old.begin(SAID), lambda: old.begin_with(SAID), old.settle),
        ):
            with pytest.raises(AgentError, match=": the trajectory has ended") as caught:
                await act()
            refused.append(str(caught.value).partition(":")[0])

    trajectory = await run_two(first, second)
    assert (trajectory.outcome, len(refused)) == (Outcome.COMPLETED, 10)
    assert [span.kind for span in trajectory.transcript.spans] == ["prompt", "generated"]
    assert len(trajectory.segments) == 1
    assert [message.role for message in trajectory.messages] == ["user", "assistant"]


@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
async def test_generation_under_way_as_its_trajectory_ends_is_cut_and_appends_nothing() -> None:
    contexts: list[AgentContext] = []
    errors: list[AgentError] = []

    async def first(context: AgentContext) -> None:
        contexts.append(context)
        await anyio.sleep(0.3)
        raise LookupError("the end")

    async def second(context: AgentContext) -> None:
        await anyio.sleep(0.2)
        began = anyio.current_time()
        with pytest.raises(AgentError) as caught:
            await contexts[0].generate()
        if anyio.current_time() < began + 1:  # it would take more than two seconds
            errors.append(caught.value)

    trajectory = await run_two(first, second, SCENARIO.timing(base_s=0.1, slope_s=0.0))
    assert list(map(str, errors)) == ["the trajectory has ended"]
    assert (trajectory.cause.type, trajectory.generated_length) == ("LookupError", 0)
    assert [span.kind for span in trajectory.transcript.spans] == ["prompt"]


async def test_tool_that_runs_on_as_its_trajectory_ends_is_not_blamed() -> None:
    contexts: list[AgentContext] = []
    texts: list[str] = []

    async def first(context: AgentContext) -> None:
        await context.generate()
        contexts.append(context)
        await anyio.sleep(0.3)

    async def second(context: AgentContext) -> None:
        await context.generate()
        await anyio.sleep(0.2)
        with pytest.raises(AgentError, match="answer: the trajectory has ended"):
            await contexts[0].call_tools([{"name": "look", "arguments": {}}])
        (answer,) = await context.call_tools([{"name": "look", "arguments": {}}])
        texts.append(answer.text)

    await run_two(first, second)
    assert texts == ["all is fine"]


async def test_segment_that_was_left_opens_no_other_and_does_not_begin_again() -> None:
    async def trial(context: AgentContext) -> None:
        async with context.open_segment(SAID) as child:
            await child.generate()
        for act in (child.generate, child.branch, lambda: child.begin(SAID)):
            with pytest.raises(AgentError, match="is closed: its block was left"):
                await act()
        with pytest.raises(AgentError, match="is closed"):
            async with child.open_segment(SAID):
                pass

    (trajectory,) = (await run_trial(trial, SCENARIO)).trajectories
    assert (trajectory.outcome, len(trajectory.segments)) == (Outcome.COMPLETED, 2)
