"""A run whose trajectories have several segments, saved for reports of it."""

from __future__ import annotations

from pathlib import Path

import anyio

from rollout import (
    AgentContext,
    AgentLoop,
    Prompt,
    RolloutBatch,
    function_tool,
    open_rollout,
    register_agent,
)
from rollout.config import ObserveConfig
from rollout.testing import Scenario, run_virtual, tool_call

#: Seconds of a call of each tool.
ALPHA_S, BETA_S = 1.0, 2.0


@function_tool
async def alpha(x: int) -> str:
    """Alpha.

    Args:
        x: A number.
    """
    await anyio.sleep(ALPHA_S)
    return f"alpha says {x}"


@function_tool
async def beta(x: int) -> str:
    """Beta.

    Args:
        x: A number.
    """
    await anyio.sleep(BETA_S)
    return f"beta says {x}"


@register_agent("several_segments")
class SeveralSegments(AgentLoop):
    """Main turn, branch, sub-agent, another main turn, and the rest after a compaction."""

    async def run(self, context: AgentContext) -> None:
        await context.call_tools((await context.generate()).calls)
        branch = await context.branch()
        branch.observe([{"role": "user", "content": "BRANCH please"}])
        await branch.call_tools((await branch.generate()).calls)
        await branch.generate()
        helper = await context.subagent([{"role": "user", "content": "HELP me"}])
        await helper.call_tools((await helper.generate()).calls)
        await helper.generate()
        context.observe([{"role": "user", "content": "GO on"}])  # after a turn without words
        await context.call_tools((await context.generate()).calls)
        await context.compact([{"role": "user", "content": "NOTES so far"}])
        await context.call_tools((await context.generate()).calls)
        await context.generate()


SCENARIO = (
    Scenario(seed=3)
    .reply("GO on", "Certainly." + tool_call("alpha", x=2))
    .reply("BRANCH please", tool_call("beta", x=20) + tool_call("beta", x=21))
    .then("Branch done.")
    .reply("HELP me", tool_call("beta", x=10), filler=200)
    .then("Helper done.")
    .reply("NOTES", tool_call("alpha", x=3))
    .then("Done.")
    .reply("START", tool_call("alpha", x=1))
)
#: An example before the question: it is no turn of the trajectory's.
EXAMPLES = [
    {"role": "system", "content": "You are good."},
    {"role": "user", "content": "An example"},
    {"role": "assistant", "content": "Certainly."},
    {"role": "user", "content": "START now"},
]


def write_segments(directory: Path) -> Path:
    """Write the run of one prompt; returns the directory."""
    prompts = [Prompt(messages=EXAMPLES, uid="several", agent_name="several_segments")]

    async def body() -> RolloutBatch:
        config = SCENARIO.config(observe=ObserveConfig(path=str(directory)))
        async with open_rollout(config, [alpha, beta], lambda _: 1.0) as runtime:
            return await runtime.generate(prompts)

    run_virtual(body).save(directory)
    return directory
