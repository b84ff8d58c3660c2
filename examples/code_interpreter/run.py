"""Mathematics with a code interpreter: the agent and the reward of ReTool.

python examples/code_interpreter/run.py

The model may run Python in a sandbox before it says its answer in a box. A right answer is worth
1, a wrong one -1, raised by 0.1 for each call up to -0.6, so that a model that is still wrong
learns to compute. A scripted engine stands in for a model; with a real one:

rollout run CONFIG --prompts PROBLEMS.jsonl --tools examples/code_interpreter/run.py \
    --reward examples/code_interpreter/run.py:reward
"""

import re

import anyio

import rollout
from rollout.config import SchedulingConfig
from rollout.testing import Scenario, tool_call
from rollout.tools import PythonTool

code_interpreter = PythonTool("code_interpreter", timeout_s=30)

SYSTEM = (
    "Solve the problem. Use the code interpreter where that helps. Say the final answer as "
    r"\boxed{answer}."
)
PROBLEM = "How many positive integers below 1000 are divisible by neither 3 nor 7?"
PROGRAM = "sum(n % 3 != 0 and n % 7 != 0 for n in range(1, 1000))"
SCRIPT = (
    Scenario(seed=3)
    .reply("neither 3 nor 7", tool_call("code_interpreter", code=PROGRAM))
    .then(r"There are \boxed{571}.", r"I am sure: \boxed{570}.")
)
WRONG, BEST_WRONG, PER_CALL = -1.0, -0.6, 0.1


def boxed(text: str) -> str | None:
    """What the last box holds, braces within it included; None where there is none."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len(r"\boxed{")
    for at in range(begin, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[begin:at]
    return None


def normal(answer: str | None) -> str | None:
    """An answer without what does not change it."""
    return None if answer is None else re.sub(r"[\s,$]|\\!|\\,", "", answer).rstrip(".")


def reward(trajectory: rollout.Trajectory) -> float:
    """ReTool's: 1 for the right answer; a wrong one is worth more the more was computed."""
    if normal(boxed(trajectory.answer)) == normal(str(trajectory.prompt.ground_truth)):
        return 1.0
    calls = trajectory.metrics["tool_calls"]
    return min(BEST_WRONG, WRONG + PER_CALL * calls)


async def main() -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROBLEM}]
    prompt = rollout.Prompt(messages=messages, ground_truth="571")
    config = SCRIPT.config(scheduling=SchedulingConfig(samples_per_prompt=4))
    tools = [code_interpreter]
    async with rollout.open_rollout(config, tools=tools, reward=reward) as runtime:
        batch = await runtime.generate([prompt])
    for trajectory in batch.trajectories:
        computed = next(m.content for m in trajectory.messages if m.role == "tool")
        print(f"computed {computed.strip()}, said {trajectory.answer!r}: {trajectory.reward:g}")


if __name__ == "__main__":
    anyio.run(main)
