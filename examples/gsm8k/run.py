"""A GSM8K-style tool agent: preprocessing that names the agent, and a tool that gives the reward.

python examples/gsm8k/run.py [KEY=VALUE ...]      such as scheduling.samples_per_prompt=8
"""

import sys
import tempfile
from pathlib import Path

import anyio
import msgspec
from preprocess import preprocess

import rollout
from rollout.config import load_config
from rollout.scheduling.prompt_files import read_prompts
from rollout.tools import load_tools
from rollout.types import Message, Prompt, ToolCall

HERE = Path(__file__).parent
#: A small model learns a call's format from a few examples, not from a description.
EXAMPLES = {
    "Ann has 1 cat and gets 1 more. How many cats has she?": "2",
    "Ben has 5 apples and eats 2. How many apples are left?": "3",
    "A car has 4 wheels. How many wheels have 2 cars?": "8",
}


def prompts() -> list[Prompt]:
    """The data set, preprocessed into a file, read, and shown after the examples."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "prompts.jsonl"
        preprocess(HERE / "train.jsonl", file)
        return [after_examples(prompt) for prompt in read_prompts(file)]


def after_examples(prompt: Prompt) -> Prompt:
    system, user = prompt.messages
    shown = [
        message for question, answer in EXAMPLES.items() for message in solved(question, answer)
    ]
    return msgspec.structs.replace(prompt, messages=[system, *shown, user])


def solved(question: str, answer: str) -> list[Message]:
    """A conversation in which the answer is checked and said."""
    call = ToolCall(name="check_answer", arguments={"answer": answer})
    return [
        Message(role="user", content=question),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", name=call.name, content=f"{answer} scores 1.0"),
        Message(role="assistant", content=answer),
    ]


def reward(trajectory: rollout.Trajectory) -> float:
    """What the tool said: the last answer's score, less what idle attempts cost."""
    return sum(trajectory.tool_rewards)


async def main() -> None:
    config = load_config("conf/quickstart.py", sys.argv[1:])
    tools = load_tools(HERE / "reward_tool.py")
    async with rollout.open_rollout(config, tools=tools, reward=reward) as runtime:
        batch = await runtime.generate(prompts())
    for sample in batch.samples:
        calls = sample.metrics["tool_calls"]
        print(f"{sample.uid}: {sample.outcome.value}, {calls:g} calls, reward {sample.reward}")


if __name__ == "__main__":
    anyio.run(main)
