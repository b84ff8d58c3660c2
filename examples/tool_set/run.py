"""One object with state, several tools: the model opens a safe.

python examples/tool_set/run.py [KEY=VALUE ...]

A scripted engine stands in for a model; with `engine.kind=transformers` it is a real one. The class
would run as `environment_factory` of TRL too.
"""

import sys

import anyio

import rollout
from rollout.config import load_config
from rollout.testing import Scenario
from rollout.testing.scenario import tool_call

SCRIPT = Scenario().reply("Open the safe", tool_call("listen", digit=2))
SCRIPT = SCRIPT.then(tool_call("try_code", digits="274")).then("It is open.")


class Safe:
    """Its code is a column of the prompt's row."""

    def reset(self, code: str, **others: object) -> str:
        self.code, self.is_open = code, False
        return f" The code has {len(code)} digits."

    def listen(self, digit: int) -> str:
        """Listen to the lock while you turn one of its wheels.

        Args:
            digit: Which wheel, counted from 1.
        """
        return f"It clicks at {self.code[digit - 1]}."

    def try_code(self, digits: str) -> str:
        """Try to open the safe.

        Args:
            digits: The code to try.
        """
        self.is_open = digits == self.code
        return "It opens." if self.is_open else "Nothing happens."

    def get_reward(self) -> float:
        return float(self.is_open)


async def main() -> None:
    settings = sys.argv[1:]
    config = load_config("conf/quickstart.py", settings) if settings else SCRIPT.config()
    message = {"role": "user", "content": "Open the safe."}
    prompt = rollout.Prompt(messages=[message], extra={"code": "274"})
    async with rollout.open_rollout(config, tools=[rollout.ToolSet(Safe)]) as runtime:
        batch = await runtime.generate([prompt])
    for said in batch.trajectories[0].messages:
        print(f"{said.role:<10} {said.content or said.tool_calls}")
    print(f"reward {batch.trajectories[0].reward:.1f}")


if __name__ == "__main__":
    anyio.run(main)
