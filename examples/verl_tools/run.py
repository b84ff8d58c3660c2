"""A GSM8K-style tool agent: verl's tool YAML and its class, and the rows that verl trains on.

python examples/verl_tools/run.py [KEY=VALUE ...]
"""

import re
import sys
from pathlib import Path
from typing import Any

import anyio

import rollout
from rollout.config import load_config
from rollout.tools import load_verl_tools
from rollout.types import Message, Prompt, ToolCall

TOOLS = Path(__file__).with_name("tools.yaml")
NAME = "calc_gsm8k_reward"
SYSTEM = "Solve the problem, check your answer with the tool, then say it."
#: A small model learns a call's format from a few examples, not from a description.
EXAMPLES = {
    "Ann has 1 cat and gets 1 more. How many cats has she?": "2",
    "Ben has 5 apples and eats 2. How many apples are left?": "3",
    "A car has 4 wheels. How many wheels have 2 cars?": "8",
}

#: As in the data set: the solution ends with the answer.
ROWS = [
    {"question": "Tom has 3 pens and buys 4. How many pens has he?", "answer": "3+4=7\n#### 7"},
    {"question": "A box holds 6 eggs. How many eggs hold 2 boxes?", "answer": "6*2=12\n#### 12"},
]


def preprocessed(row: dict[str, str], index: int) -> dict[str, Any]:
    """A row as the preprocessing for verl leaves it: with `agent_name` and the tool's kwargs."""
    truth = re.findall(r"#### (-?[\d.,]+)", row["answer"])[-1].replace(",", "")
    return {
        "data_source": "gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": row["question"]},
        ],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "index": index,
            "tools_kwargs": {NAME: {"create_kwargs": {"ground_truth": truth}}},
        },
    }


def as_prompt(row: dict[str, Any]) -> Prompt:
    """A preprocessed row as a prompt, after the examples."""
    system, user = row["prompt"]
    shown = [
        message for question, answer in EXAMPLES.items() for message in solved(question, answer)
    ]
    return Prompt(
        messages=[system, *shown, user],
        uid=f"{row['data_source']}-{row['extra_info']['index']}",
        agent_name=row["agent_name"],
        tools_kwargs=row["extra_info"]["tools_kwargs"],
        ground_truth=row["reward_model"]["ground_truth"],
        data_source=row["data_source"],
    )


def solved(question: str, answer: str) -> list[Message]:
    """A conversation in which the answer is checked and said."""
    return [
        Message(role="user", content=question),
        Message(role="assistant", tool_calls=(ToolCall(name=NAME, arguments={"answer": answer}),)),
        Message(role="tool", name=NAME, content=f"{answer} scores 1.0"),
        Message(role="assistant", content=answer),
    ]


def prompts() -> list[Prompt]:
    """The rows, preprocessed."""
    return [as_prompt(preprocessed(row, index)) for index, row in enumerate(ROWS)]


def reward(trajectory: rollout.Trajectory) -> float:
    """What the tool said at the end; 0 where the model never asked it."""
    return trajectory.tool_rewards[-1] if trajectory.tool_rewards else 0.0


async def main() -> None:
    config = load_config("conf/quickstart.py", sys.argv[1:])
    tools = load_verl_tools(TOOLS)
    async with rollout.open_rollout(config, tools=tools, reward=reward) as runtime:
        batch = await runtime.generate(prompts())
    for sample in batch.samples:
        calls = sample.metrics["tool_calls"]
        print(f"{sample.uid}: {sample.outcome.value}, {calls:g} calls, reward {sample.reward}")


if __name__ == "__main__":
    anyio.run(main)
