"""Trajectories that cannot run or fail: said in words, once for each cause."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

import rollout
from rollout import AgentLoop, Outcome, Prompt, SchedulingConfig, Trajectory, function_tool
from rollout.agents import AgentContext, agent_names, register_agent
from rollout.interactions import ScriptedUser
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

SCENARIO = Scenario(seed=1).reply("hello", "ok").timing(base_s=0.0, slope_s=0.0)


@register_agent("endings_failing")
class Failing(AgentLoop):
    """Fails of what its prompt says."""

    async def run(self, context: AgentContext) -> None:
        raise LookupError(context.prompt.extra["why"])


@function_tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def user(**fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": "hello"}], **fields)


async def run(
    prompts: Sequence[Prompt], *, samples: int = 1, reward: Any = None
) -> list[Trajectory]:
    scheduling = SchedulingConfig(samples_per_prompt=samples, max_failures=None)
    config = SCENARIO.config(scheduling=scheduling)
    users = [ScriptedUser(["And?"], name="curious")]
    async with rollout.open_rollout(config, [add], reward, users) as runtime:
        try:
            batch = await runtime.generate(prompts)
        except rollout.PromptError:
            assert runtime.statistics().admitted == 0
            raise
    return batch.trajectories


def interaction(name: Any) -> dict[str, Any]:
    return {"extra": {"interaction_kwargs": {"name": name}}}


UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    (
        {"agent_name": "tool_agnet"},
        "unknown_agent",
        "agent_name = 'tool_agnet': no agent is registered as 'tool_agnet'; known: AGENTS",
    ),
    ({"tools": ["ad"]}, "unknown_tool", "tools: no tool is called 'ad'; known: 'add'"),
    (
        interaction("teacher"),
        "unknown_interaction",
        "extra['interaction_kwargs']['name'] = 'teacher': unknown interaction 'teacher'; "
        "known: 'curious'",
    ),
]


@pytest.mark.parametrize(("fields", "reason", "said"), UNKNOWN)
async def test_call_whose_every_prompt_names_what_nobody_registered_starts_nothing(
    fields: dict[str, Any], reason: str, said: str
) -> None:
    with pytest.raises(rollout.PromptError) as caught:
        await run([user(**fields) for _ in range(10)])
    said = said.replace("AGENTS", ", ".join(agent_names()))  # other tests register theirs
    assert str(caught.value) == (
        f"no prompt can run, since nobody registered:\n  prompts[0].{said} (and 9 further prompts)"
    )


@pytest.mark.parametrize(("fields", "reason", "said"), UNKNOWN)
async def test_call_of_which_some_name_what_nobody_registered_rejects_those_and_says_so_once(
    fields: dict[str, Any], reason: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [*(user(**fields) for _ in range(9)), user()]
    with caplog.at_level(logging.WARNING, "rollout"):
        *others, last = await run(prompts, samples=4)
    assert last.outcome is Outcome.COMPLETED
    rejected = [row for row in others if row.outcome is Outcome.REJECTED]
    assert len(rejected) == 36
    assert {row.reason for row in rejected} == {reason}
    (line,) = [each for each in caplog.messages if "offered" not in each]  # no tool was called
    assert line.startswith(f"prompt-0/0 rejected ({reason}): ")
    assert line.endswith(" (36 trajectories)")


async def test_stream_whose_every_prompt_names_what_nobody_registered_starts_nothing() -> None:
    async with rollout.open_rollout(SCENARIO.config()) as runtime:
        with pytest.raises(rollout.PromptError, match="'nobody'"):
            async with runtime.stream([user(agent_name="nobody")]):
                pytest.fail("it was entered")


async def test_failures_are_logged_once_for_each_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(count: int, why: str) -> list[Prompt]:
        fields = {"agent_name": "endings_failing", "extra": {"why": why}}
        return [user(**fields) for _ in range(count)]

    async def reward(trajectory: Trajectory) -> float:
        raise OSError("no judge")

    prompts = [*failing(50, "lost keys"), user(), user(), *failing(30, "no map")]
    with caplog.at_level(logging.INFO, "rollout.scheduling"):
        await run(prompts, reward=reward)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        "prompt-0/0 failed (agent): LookupError('lost keys') (50 trajectories)",
        "prompt-52/0 failed (agent): LookupError('no map') (30 trajectories)",
        "reward of prompt-50 failed: OSError('no judge') (2 trajectories)",
    ]
    early = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert len(early) == 3
    assert early[0].endswith("; others of this cause are counted")


async def test_failures_of_many_causes_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [
        user(agent_name="endings_failing", extra={"why": f"key {index}"}) for index in range(40)
    ]
    with caplog.at_level(logging.WARNING, "rollout"):
        await run(prompts)
    assert len(caplog.messages) == 6
    assert caplog.messages[-1] == "35 trajectories failed of 35 further causes"


async def test_call_that_goes_well_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rollout.scheduling"):
        await run([user()])
    assert caplog.messages == []


async def test_caller_that_is_cancelled_as_it_leaves_a_stream_gets_its_cancellation() -> None:
    config = Scenario(seed=1).reply("", "ok").config()
    with anyio.CancelScope() as scope:
        async with rollout.open_rollout(config) as runtime:
            async with runtime.stream([Prompt("go")]):
                scope.cancel()
    assert scope.cancelled_caught


async def test_slow_consumer_of_a_stream_gets_every_trajectory_that_was_cancelled() -> None:
    few = SchedulingConfig(samples_per_prompt=22, max_in_flight=4)
    async with rollout.open_rollout(Scenario(seed=1).reply("", "ok").config(scheduling=few)) as run:
        async with run.stream([Prompt("go")]) as trajectories:
            run.cancel(reason="enough")
            found = []
            async for trajectory in trajectories:
                await anyio.sleep(1.0)  # the buffer is full
                found.append(trajectory.member)
    assert sorted(found) == list(range(22))
