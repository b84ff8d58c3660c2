"""verl's tool configuration and its class, as they are; `examples/gsm8k` has a whole data set.

python examples/verl_tools/run.py [KEY=VALUE ...]
"""

import sys
from pathlib import Path

import anyio

import rollout
from rollout.config import load_config
from rollout.tools import load_verl_tools
from rollout.types import Message, Prompt, ToolCall

TOOLS = Path(__file__).with_name("tools.yaml")
NAME = "calc_gsm8k_reward"
#: A small model learns a call's format from an example, not from a description.
SHOWN = [
    Message(role="system", content="Solve the problem, check your answer, then say it."),
    Message(role="user", content="Ann has 1 cat and gets 1 more. How many cats has she?"),
    Message(role="assistant", tool_calls=(ToolCall(name=NAME, arguments={"answer": "2"}),)),
    Message(role="tool", name=NAME, content="2 scores 1.0"),
    Message(role="assistant", content="2"),
]
PROBLEMS = {
    "Tom has 3 pens and buys 4. How many pens has he?": "7",
    "A box holds 6 eggs. How many eggs hold 2 boxes?": "12",
}


def prompts() -> list[Prompt]:
    """The problems; what verl's class calls `create_kwargs` travels in `tools_kwargs`."""
    return [
        Prompt(
            messages=[*SHOWN, Message(role="user", content=question)],
            uid=f"problem-{number}",
            tools_kwargs={NAME: {"create_kwargs": {"ground_truth": answer}}},
        )
        for number, (question, answer) in enumerate(PROBLEMS.items())
    ]


def reward(trajectory: rollout.Trajectory) -> float:
    """What the tool said at the end; 0 where the model never asked it."""
    return trajectory.tool_rewards[-1] if trajectory.tool_rewards else 0.0


async def main() -> None:
    config = load_config("conf/quickstart.py", sys.argv[1:])
    tools = load_verl_tools(TOOLS)
    async with rollout.open_rollout(config, tools=tools, reward=reward) as runtime:
        batch = await runtime.generate(prompts())
    for sample in batch.samples:
        print(f"{sample.uid}: {sample.outcome.value}, rewards {sample.tool_rewards}")


if __name__ == "__main__":
    anyio.run(main)
