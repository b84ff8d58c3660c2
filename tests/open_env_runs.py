"""Trajectories that play an OpenEnv server, on a scripted engine."""

from __future__ import annotations

from typing import Any

import rollout
from rollout import EnvironmentAgent, Prompt, Trajectory, register_agent
from rollout.config import AgentConfig, LimitsConfig
from rollout.environments import OpenEnv
from rollout.testing import Scenario
from rollout.testing.scenario import tool_call

LIMITS = LimitsConfig(
    generation_s=20, tool_s=10, turn_s=40, trajectory_s=60, batch_s=500, cleanup_s=2
)


def prompts(count: int = 1, **extra: Any) -> list[Prompt]:
    said = [{"role": "user", "content": "Echo."}]
    return [Prompt(messages=said, uid=f"p{n}", extra=extra) for n in range(count)]


def scenario(*turns: str) -> Scenario:
    first, *rest = turns
    made = Scenario(seed=1).timing(base_s=0.001, slope_s=0.0, prefill_tokens_per_s=1e9)
    made = made.reply("Echo", first)
    for text in rest:
        made = made.then(text)
    return made


async def act_by_text(
    server: OpenEnv, *turns: str, given: list[Prompt] | None = None, **options: Any
) -> list[Trajectory]:
    name = f"plays_{server.url}"
    register_agent(name)(EnvironmentAgent(server))
    options.setdefault("limits", LIMITS)
    config = scenario(*turns).config(agent=AgentConfig(name=name), **options)
    async with rollout.open_rollout(config) as runtime:
        return list((await runtime.generate(given or prompts())).trajectories)


async def act_by_tool(
    server: OpenEnv, *turns: str, given: list[Prompt] | None = None, samples: int = 1
) -> list[Trajectory]:
    config = scenario(*turns).config(limits=LIMITS)
    async with rollout.open_rollout(config, [server]) as runtime:
        return list((await runtime.generate(given or prompts(), samples=samples)).trajectories)


def step(text: str) -> str:
    return tool_call("step", text=text)
