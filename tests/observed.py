"""What tests of events, traces and timelines share: a run with tools, and who reads it."""

from __future__ import annotations

from typing import Any

import anyio

import rollout
from rollout import Prompt, RolloutBatch, function_tool
from rollout.config import SchedulingConfig
from rollout.observe.events import AnyEvent
from rollout.testing import Scenario, run_virtual, tool_call

TOOL_S = 0.5
ANSWER = "It is 3."


@rollout.trace
def added(a: int, b: int) -> int:
    return a + b


@rollout.trace(name="slowly")
async def slowly_added(a: int, b: int) -> int:
    await anyio.sleep(TOOL_S)
    return added(a, b)


@function_tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return await slowly_added(a, b)


@function_tool
async def broken(a: int) -> int:
    """Fail.

    Args:
        a: A number.
    """
    raise ValueError("no such number")


async def reward(trajectory: rollout.Trajectory) -> float:
    if trajectory.uid == "bad":
        raise RuntimeError("no reward for that")
    return 1.0


SCENARIO = (
    Scenario(seed=1)
    .reply("please sum", tool_call("add", a=1, b=2))
    .then(ANSWER)
    .reply("please break", tool_call("broken", a=1))
    .then("It does not work.")
)


def prompts(*texts: str) -> list[Prompt]:
    """One for each, whose uid is its first word."""
    return [
        Prompt(messages=[{"role": "user", "content": text}], uid=text.split()[0]) for text in texts
    ]


def run(
    asked: list[Prompt],
    observe: Any = None,
    *,
    samples: int = 1,
    scenario: Scenario = SCENARIO,
    **sections: Any,
) -> tuple[RolloutBatch, list[AnyEvent]]:
    """A batch in virtual time, and every event of its call, as a reader got them."""
    sections |= {} if observe is None else {"observe": observe}
    config = scenario.config(scheduling=SchedulingConfig(samples_per_prompt=samples), **sections)
    read: list[AnyEvent] = []

    async def body() -> RolloutBatch:
        opened = rollout.open_rollout(config, [add, broken], reward)
        async with opened as runtime:
            runtime.services.events.attach(lambda event, subject: read.append(event))
            return await runtime.generate(asked, step=7)

    return run_virtual(body), read


def of_kind(events: list[AnyEvent], kind: type) -> list[Any]:
    """Those of one kind, in their order."""
    return [event for event in events if type(event) is kind]
