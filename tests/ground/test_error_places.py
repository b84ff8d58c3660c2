"""Where errors happened is told from the user's first line in, and never within an event loop."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import rollout
from rollout import AgentLoop, Outcome, Prompt, function_tool, register_agent
from rollout.testing import Scenario, tool_call

LOOPS = ("/trio/", "/anyio/", "/asyncio/", "/outcome/", "/concurrent/")

pytestmark = pytest.mark.anyio


@rollout.agent(name="function that raises")
async def raising(task: Any) -> None:
    await anyio.lowlevel.checkpoint()
    raise KeyError("of a function")


@rollout.agent(name="sync function that raises")
def raising_in_a_thread(task: Any) -> None:
    raise KeyError("of a thread")


@register_agent("too late")
class TooLate(AgentLoop):
    async def run(self, context: Any) -> None:
        with anyio.fail_after(0.01):
            await anyio.sleep(5)


@register_agent("task group")
class InGroup(AgentLoop):
    async def run(self, context: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.fail)

    async def fail(self) -> None:
        raise KeyError("of a task")


@function_tool
def broken() -> None:
    """Raise."""
    raise ValueError("no such row")


def judge(trajectory: Any) -> float:
    if trajectory.extra.get("judged"):
        raise ValueError("no such answer")
    return 1.0


async def ended(name: str, **extra: Any) -> rollout.Trajectory:
    config = Scenario(seed=1).reply("go", tool_call("broken")).then("Done.").config()
    prompt = Prompt(messages=[{"role": "user", "content": "go"}], agent_name=name, extra=extra)
    async with rollout.open_rollout(config, [broken], judge) as runtime:
        (trajectory,) = (await runtime.generate([prompt])).trajectories
    return trajectory


def assert_is_of_the_user(text: str, last: str) -> None:
    assert text.lstrip().startswith(f'File "{__file__}"')
    assert last in text
    assert not any(loop in text for loop in LOOPS)


@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("function that raises", 'raise KeyError("of a function")'),
        ("sync function that raises", 'raise KeyError("of a thread")'),
        ("task group", 'raise KeyError("of a task")'),
        ("too late", "with anyio.fail_after(0.01):"),
    ],
)
async def test_cause_of_a_failed_agent_is_placed_in_the_users_lines(
    anyio_backend: str, name: str, line: str
) -> None:
    trajectory = await ended(name)
    assert trajectory.outcome is Outcome.FAILED
    assert trajectory.cause is not None
    assert_is_of_the_user(trajectory.cause.traceback, line)


async def test_cause_of_a_failed_reward_is_placed_in_the_users_lines() -> None:
    trajectory = await ended("tool_agent", judged=True)
    assert trajectory.cause is not None
    assert_is_of_the_user(trajectory.cause.traceback, 'raise ValueError("no such answer")')


async def test_first_traceback_of_a_tool_is_placed_in_the_users_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "rollout"):
        await ended("tool_agent")
    (said,) = [text for text in caplog.messages if "broken" in text]
    _, text = said.split("Traceback (most recent call last):\n")
    assert_is_of_the_user(text, 'raise ValueError("no such row")')
