"""The task of `rollout demo`: sums that a small model solves with a calculator.

A configuration like those in ``conf/``: ``rollout check rollout.cli.demo`` explains it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rollout.cli.check import is_importable
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    RolloutConfig,
    SamplingConfig,
    SchedulingConfig,
    TransformersEngine,
)
from rollout.seeds import derive_seed
from rollout.tools.builtin import calculate, calculator, format_number
from rollout.types import Message, Prompt, Reward, ToolCall

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory

config = RolloutConfig(
    engine=TransformersEngine(max_running=64),
    sampling=SamplingConfig(temperature=0.8),
    lengths=LengthsConfig(prompt=768, response=256, turn=64),
    agent=AgentConfig(max_assistant_turns=4),
    scheduling=SchedulingConfig(samples_per_prompt=4, max_in_flight=64),
    seed=0,
)

DATASET = "chain_sum"
DIFFICULTY = {"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 3}

SYSTEM = "Use the calculator for every calculation, then state its result."
QUESTION = "State the final answer to the following arithmetic problem: {expression} ="
#: A model of 135 million parameters learns the format from examples, not from a description.
EXAMPLES = ("914 - 350 + 28", "31 - 74", "57 + 86")
ANSWER = "The answer is {result}."

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@attrs.frozen
class ArithmeticTasks:
    """Tasks of reasoning-gym with the scorer that belongs to them.

    Attributes:
        prompts: One for each task; `extra` holds its question and its index.
    """

    dataset: Any
    entries: Sequence[Mapping[str, Any]]
    prompts: Sequence[Prompt]

    def reward(self, trajectory: Trajectory) -> Reward:
        """The scorer's opinion of the last number said: 1 for the right one, little for a near one.

        `extra` gets ``answer`` (that number, or None) and ``is_right_call`` (whether the
        calculator's result was the right answer).
        """
        prompt = trajectory.prompt
        assert prompt is not None
        entry = self.entries[prompt.extra["index"]]
        said = trajectory.messages[len(prompt.messages) :]
        answer = _last_number(said)
        is_right_call = any(
            message.role == "tool"
            and message.name == calculator.name
            and message.content == entry["answer"]
            for message in said
        )
        return Reward(
            value=self.dataset.score_answer(answer, entry),
            extra={"answer": answer, "is_right_call": is_right_call},
        )


def task_faults() -> list[str]:
    """What is missing for `arithmetic_tasks`."""
    if is_importable("reasoning_gym"):
        return []
    return ["its tasks come from the package reasoning-gym: pip install reasoning-gym"]


def arithmetic_tasks(count: int, seed: int) -> ArithmeticTasks:
    """`count` sums of two or three numbers, the same ones for the same seed."""
    import reasoning_gym  # type: ignore[import-untyped]

    # Its task number i is drawn from seed + i: neighbouring seeds of ours must lie far apart.
    start = derive_seed(seed, DATASET) % 2**31
    dataset = reasoning_gym.create_dataset(DATASET, size=count, seed=start, **DIFFICULTY)
    entries = [dataset[index] for index in range(count)]
    prompts = [_prompt(index, entry) for index, entry in enumerate(entries)]
    return ArithmeticTasks(dataset, entries, prompts)


def is_solved(trajectory: Trajectory) -> bool:
    """Whether it made the right call and gave the right answer."""
    return trajectory.reward == 1.0 and bool(trajectory.extra.get("is_right_call"))


def _prompt(index: int, entry: Mapping[str, Any]) -> Prompt:
    return Prompt(
        messages=[
            Message(role="system", content=SYSTEM),
            *(message for expression in EXAMPLES for message in _example(expression)),
            Message(role="user", content=entry["question"]),
        ],
        uid=f"{DATASET}-{index}",
        ground_truth=entry["answer"],
        data_source=f"reasoning_gym/{DATASET}",
        extra={"question": entry["metadata"]["expression"], "index": index},
    )


def _example(expression: str) -> tuple[Message, ...]:
    result = format_number(calculate(expression))
    call = ToolCall(name=calculator.name, arguments={"expression": expression})
    return (
        Message(role="user", content=QUESTION.format(expression=expression)),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", name=calculator.name, content=result),
        Message(role="assistant", content=ANSWER.format(result=result)),
    )


def _last_number(messages: Sequence[Message]) -> str | None:
    """The last number of the last message, where the assistant wrote it."""
    if not messages or messages[-1].role != "assistant":
        return None
    numbers = _NUMBER.findall(messages[-1].content or "")
    return numbers[-1] if numbers else None
