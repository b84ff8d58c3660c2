"""A tool that checks answers and gives the reward; `--tools examples/gsm8k/reward_tool.py`."""

from typing import Any

from rollout import Tool, ToolSession
from rollout.tools import ToolContext
from rollout.types import ToolCall

#: What an attempt that is no better than the one before costs.
PENALTY = 0.05
SCHEMA = {
    "type": "function",
    "function": {
        "name": "check_answer",
        "description": "Check an answer to the problem. Gives 1.0 where it is right, else 0.0.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer, digits only."}},
            "required": ["answer"],
        },
    },
}


class AnswerChecker(Tool):
    """Compares a model's answers with the one that preprocessing put into the prompt."""

    name = "check_answer"
    schema = SCHEMA

    async def open(self, context: ToolContext) -> ToolSession:
        return Checking(context.create_kwargs["ground_truth"])


class Checking(ToolSession):
    """The answers of one trajectory."""

    def __init__(self, truth: str) -> None:
        self.truth = truth
        self.score = 0.0

    async def execute(self, call: ToolCall) -> Any:
        answer = call.arguments["answer"]
        score = float(answer.strip().replace(",", "") == self.truth)
        reward = 0.0 if score > self.score else -PENALTY
        self.score = score
        return f"{answer} scores {score}", reward

    async def calc_reward(self) -> float:
        return self.score


check_answer = AnswerChecker()
