"""A gym-style environment: the model guesses a number, and each guess is rewarded.

python examples/environment/run.py [KEY=VALUE ...]

A scripted engine stands in for a model; with `engine.kind=transformers` it is a real one.
"""

import re
import sys

import anyio

import rollout
from rollout.config import load_config
from rollout.testing import Scenario

SCRIPT = (
    Scenario().reply("between 1 and 100", "50").then("75").then("62").then("68").then("I say 65!")
)


class Guess:
    """Says "higher" or "lower"; each halving of the distance is worth something."""

    async def reset(self, prompt: rollout.Prompt) -> str:
        self.number = int(prompt.ground_truth)
        self.closest = 100
        return "I think of a number between 1 and 100. Which one is it?"

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, int]]:
        said = re.search(r"\d+", action)
        if said is None:
            return "Say a number.", -0.1, False, {}
        distance = abs(int(said[0]) - self.number)
        reward = 1.0 if not distance else 0.1 * (2 * distance <= self.closest)
        self.closest = min(self.closest, distance)
        hint = "higher" if int(said[0]) < self.number else "lower"
        return f"No, {hint}.", reward, not distance, {"closest": self.closest}


rollout.register_agent("guess")(rollout.EnvironmentAgent(Guess))


async def main() -> None:
    settings = sys.argv[1:]
    config = load_config("conf/quickstart.py", settings) if settings else SCRIPT.config()
    system = {"role": "system", "content": "Answer with one number."}
    prompt = rollout.Prompt(messages=[system], ground_truth=65, agent_name="guess")
    async with rollout.open_rollout(config) as runtime:
        batch = await runtime.generate([prompt])
    trajectory = batch.trajectories[0]
    for message in trajectory.messages:
        print(f"{message.role:<10} {message.content}")
    print(f"steps {trajectory.turn_scores}, reward {trajectory.reward:.1f}")


if __name__ == "__main__":
    anyio.run(main)
