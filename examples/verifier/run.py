"""A user who knows the answer, says whether the model's is right, and lets it try again.

python examples/verifier/run.py [KEY=VALUE ...]      such as scheduling.samples_per_prompt=8
"""

import sys

import anyio

import rollout
from rollout.config import load_config
from rollout.interactions import Verifier

QUESTIONS = {
    "What is 2 + 2?": 4,
    "What is 10 + 5?": 15,
    "How many days does a week have?": 7,
}
SYSTEM = rollout.Message(role="system", content="Answer with one number.")


def prompts() -> list[rollout.Prompt]:
    return [
        rollout.Prompt(
            messages=[SYSTEM, rollout.Message(role="user", content=question)],
            uid=question,
            ground_truth=answer,
        )
        for question, answer in QUESTIONS.items()
    ]


def reward(trajectory: rollout.Trajectory) -> float:
    """1 for a right first answer, and half as much for each one that it took more."""
    *wrong, last = trajectory.turn_scores or [0.0]
    return last * 0.5 ** len(wrong)


async def main() -> None:
    config = load_config("conf/quickstart.py", ["agent.interaction=verifier", *sys.argv[1:]])
    verifier = Verifier(max_attempts=3, wrong="No. Try again; you have {left} more.")
    async with rollout.open_rollout(config, reward=reward, interactions=[verifier]) as runtime:
        batch = await runtime.generate(prompts())
    for sample in batch.samples:
        print(f"{sample.uid:<34} scores {sample.turn_scores}  reward {sample.reward}")


if __name__ == "__main__":
    anyio.run(main)
