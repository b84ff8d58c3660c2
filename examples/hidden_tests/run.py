"""Hidden tests: the agent writes a program in its sandbox, and the reward tests it in a fresh one.

python examples/hidden_tests/run.py

A scripted engine stands in for a model: one answer is right, one is wrong. The sandboxes are
bubblewrap's where that is installed; else "none", which isolates nothing.
"""

from typing import Any

import anyio

import rollout
from rollout.config import SandboxConfig
from rollout.sandbox.bubblewrap import find_bwrap
from rollout.testing import Scenario
from rollout.testing.scenario import tool_call
from rollout.tools import ToolContext, function_tool

PROGRAMS = {
    "right": "def double(n):\n    return 2 * n\n",
    "wrong": "def double(n):\n    return n * n\n",
}
TESTS = "from solution import double\nassert [double(n) for n in (0, 2, 5)] == [0, 4, 10]\n"
SCRIPT = Scenario()
for word, program in PROGRAMS.items():
    SCRIPT = SCRIPT.reply(word, tool_call("write", path="solution.py", text=program)).then("Done.")


@function_tool
async def write(path: str, text: str, context: ToolContext) -> str:
    """Write a file.

    Args:
        path: Where.
        text: Its content.
    """
    await context.sandbox.write_file(path, text)
    return "written"


async def passes_tests(trajectory: rollout.Trajectory, sandbox: Any) -> float:
    """Whether the program passes tests that the agent never sees, where it has never been."""
    async with sandbox.fresh(artifacts=["solution.py"]) as judge:
        await judge.write_file("test_solution.py", TESTS)
        result = await judge.exec(["python3", "test_solution.py"], timeout_s=30)
    return float(result.exit_code == 0)


async def main() -> None:
    provider = "bubblewrap" if find_bwrap() else "none"
    config = SCRIPT.config(sandbox=SandboxConfig(provider=provider))
    prompts = [
        rollout.Prompt(messages=f"Write double(n), the {word} way.", uid=word) for word in PROGRAMS
    ]
    async with rollout.open_rollout(config, [write], passes_tests) as runtime:
        batch = await runtime.generate(prompts)
    for trajectory in batch.trajectories:
        print(f"{trajectory.uid} {trajectory.outcome}, reward {trajectory.reward}")


if __name__ == "__main__":
    anyio.run(main)
