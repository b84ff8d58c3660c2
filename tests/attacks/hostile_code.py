"""Agents, tools and rewards that raise, assign or swallow what they should not, beside good ones.

    python hostile_code.py BACKEND

Prints the outcome of each trajectory and how long everything took; ends by itself.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import time

import anyio

import rollout
from rollout import AgentLoop, Prompt, function_tool
from rollout.agents import register_agent
from rollout.config import LimitsConfig, SchedulingConfig
from rollout.testing import Scenario, tool_call
from rollout.tools import Tool, ToolSession

LIMITS = LimitsConfig(
    generation_s=4, tool_s=1, turn_s=6, trajectory_s=8, batch_s=60, reward_s=1, cleanup_s=0.5
)


class Panic(BaseException):
    def __str__(self):
        raise Panic


async def stay():
    while True:
        try:
            await anyio.sleep(3600)
        except BaseException:
            continue


@register_agent("panics")
class Panics(AgentLoop):
    async def run(self, context):
        await context.generate()
        raise BaseExceptionGroup("all at once", [Panic(), ValueError("x")])


@register_agent("stays")
class Stays(AgentLoop):
    async def run(self, context):
        try:
            await context.generate()
        finally:
            await stay()


@register_agent("assigns")
class Assigns(AgentLoop):
    async def run(self, context):
        await context.generate()
        for name in dir(context):
            if not name.startswith("_"):
                with contextlib.suppress(AttributeError):  # it may be read only
                    setattr(context, name, object())


@function_tool
async def hold() -> str:
    """Hold on."""
    await stay()
    return ""


class Closing(Tool):
    name = "closing"
    schema = {"type": "function", "function": {"name": "closing", "description": "x"}}

    async def open(self, context):
        return ClosingSession()


class ClosingSession(ToolSession):
    async def execute(self, call):
        return "open"

    async def close(self):
        await stay()


async def reward(trajectory):
    if trajectory.uid.startswith("reward"):
        await stay()
    if trajectory.uid.startswith("panic"):
        raise Panic
    return 1.0


KINDS = ("calm", "panics", "stays", "assigns", "hold", "closing", "reward", "panic")


def prompt_of(kind, number):
    agent = kind if kind in ("panics", "stays", "assigns") else None
    return Prompt(
        messages=[{"role": "user", "content": f"please {kind}"}],
        uid=f"{kind}-{number}",
        agent_name=agent,
    )


async def main():
    scenario = Scenario(seed=1).timing(base_s=0.0005, slope_s=0.0, prefill_tokens_per_s=1e9)
    for name in ("hold", "closing"):
        scenario = scenario.reply(f"please {name}", tool_call(name)).then("done")
    config = scenario.reply("", "ok").config(
        limits=LIMITS, scheduling=SchedulingConfig(max_in_flight=1000, max_failures=None)
    )
    prompts = [prompt_of(kind, number) for number in range(25) for kind in KINDS]
    async with rollout.open_rollout(config, [hold, Closing()], reward) as runtime:
        started = time.monotonic()
        batch = await runtime.generate(prompts)
        print("generate", round(time.monotonic() - started, 1))
        ends = collections.Counter(
            (t.uid.partition("-")[0], t.outcome.value, t.reason, t.reward)
            for t in batch.trajectories
        )
        for (kind, outcome, reason, value), count in sorted(ends.items(), key=str):
            print(kind, outcome, reason or "-", value, count)
        print("unresponsive", runtime.statistics().unresponsive)
        started = time.monotonic()
        with anyio.move_on_after(3):
            await runtime.generate(prompts)
        print("cancelled", round(time.monotonic() - started, 1))
        started = time.monotonic()
    print("closed", round(time.monotonic() - started, 1))


started = time.monotonic()
anyio.run(main, backend=sys.argv[1])
print("ended", round(time.monotonic() - started, 1))
