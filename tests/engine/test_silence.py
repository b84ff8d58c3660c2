"""What would pass in silence is logged at WARNING, once in a runtime."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import rollout
from rollout import AgentConfig, AgentLoop, Prompt, SchedulingConfig, function_tool
from rollout.agents import AgentContext
from rollout.cli.summary import summary_lines
from rollout.scopes import open_task_group
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio


@function_tool
def broken(x: int = 0) -> str:
    """Raise.

    Args:
        x: A number.
    """
    raise ValueError(f"no such row: {x}")


@function_tool
def works() -> str:
    """Answer."""
    return "fine"


@rollout.register_agent("says_nothing")
class SaysNothing(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        await anyio.lowlevel.checkpoint()


def config(*turns: str, samples: int = 4, agent: str = "tool_agent") -> Any:
    first, *others = turns or ("Done.",)
    scenario = Scenario(seed=1).reply("", first).timing(base_s=0.01)
    for turn in others:
        scenario = scenario.then(turn)
    return scenario.config(
        agent=AgentConfig(name=agent, tool_format="hermes"),
        scheduling=SchedulingConfig(samples_per_prompt=samples),
    )


def prompt(uid: str = "p0") -> Prompt:
    return Prompt(messages=[{"role": "user", "content": "Go."}], uid=uid)


def warnings(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.levelno == logging.WARNING and word in each.getMessage()
    ]


async def test_tool_raises_it_is_said_once_with_its_count_and_its_first_traceback(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    calls = tool_call("works") + tool_call("broken", x=7)
    async with rollout.open_rollout(config(calls, "Done."), [broken, works]) as runtime:
        batch = await runtime.generate([prompt()])
        await runtime.generate([prompt()])

    (said,) = warnings(caplog, "raised")
    assert said.startswith("The tool 'broken' raised, or took too long, in 4 of 4 calls.")
    assert "Traceback" in said
    assert 'raise ValueError(f"no such row: {x}")' in said
    assert said.endswith("ValueError: no such row: 7")
    lines = summary_lines(batch, 1.0, tmp_path)
    assert "tools     8 calls, 4 errors (broken 4 of 4)" in lines


async def test_agent_never_has_the_model_generate_it_is_said_once_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rollout.open_rollout(config(agent="says_nothing")) as runtime:
        await runtime.generate([prompt(), prompt("p1")])
        await runtime.generate([prompt()])

    (said,) = warnings(caplog, "SaysNothing")
    assert "So ended 8 of 8 trajectories" in said
    assert "await context.generate()" in said


async def test_tools_offered_and_none_called_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rollout.open_rollout(config(samples=3), [works]) as runtime:
        await runtime.generate([prompt()])
        assert not warnings(caplog, "Tools were offered")  # three turns say nothing
        await runtime.generate([prompt()])
        await runtime.generate([prompt()])

    (said,) = warnings(caplog, "Tools were offered")
    assert said.startswith("Tools were offered in 6 turns, and the model called none in any.")


@pytest.mark.parametrize("tools", [(), (works,)])
async def test_tools_not_offered_or_called_nothing_is_said(
    tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(tool_call("works"), "Done.") if tools else config("Done.")
    async with rollout.open_rollout(settings, tools) as runtime:
        await runtime.generate([prompt(), prompt("p1")])

    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_stream_waits_for_update_weights_it_is_said_once_and_explained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def source() -> AsyncIterator[Prompt]:
        for at in range(100):
            yield prompt(f"p{at}")

    async def consume(runtime: Any, step: int) -> None:
        async with runtime.stream_groups(
            source(), step=step, max_staleness=0, groups_per_step=2
        ) as groups:
            async for _ in groups:
                pass

    async with rollout.open_rollout(config(samples=1, agent="single_turn")) as runtime:
        for step in range(2):
            async with open_task_group() as tasks:
                tasks.start_soon(consume, runtime, step)
                await anyio.sleep(20)
                explained = str(runtime.explain())
                tasks.cancel_scope.cancel()
            assert "stream_groups waits for update_weights: 2 groups were taken" in explained

    (said,) = warnings(caplog, "waits for update_weights")
    assert "Call update_weights, with a version that is one higher" in said


@pytest.fixture
def advantages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module as a process has it that has not computed any."""
    monkeypatch.delitem(sys.modules, "rollout.batch.advantages", raising=False)
    return importlib.import_module("rollout.batch.advantages")


@pytest.mark.parametrize("name", ["group_relative", "leave_one_out"])
async def test_advantages_of_a_batch_without_rewards_it_is_said_once(
    name: str, advantages: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with rollout.open_rollout(config(agent="single_turn")) as runtime:
        batch = await runtime.generate([prompt()])
    function = getattr(advantages, name)
    for given in [(batch,), (torch.full((2,), torch.nan), torch.zeros(2))]:
        assert not function(*given).any()

    (said,) = warnings(caplog, name)
    assert "none of 4 rows has a reward" in said
    assert "open_rollout(…, reward=…)" in said


@pytest.mark.parametrize("rewards", [[], [1.0, torch.nan], [0.0, 0.0]])
def test_advantages_of_some_rewards_nothing_is_said(
    rewards: list[float], advantages: Any, caplog: pytest.LogCaptureFixture
) -> None:
    advantages.group_relative(torch.tensor(rewards), torch.zeros(len(rewards)))
    assert not caplog.records
