"""An agent that runs Python and shell commands in a sandbox and submits its answer.

python examples/python_sandbox/run.py

A scripted engine stands in for a model. With a real one:

rollout run CONFIG --prompts TASKS.jsonl --tools examples/python_sandbox/run.py \
    --reward examples/python_sandbox/run.py:reward
"""

import anyio

import rollout
from rollout.testing import Scenario, tool_call
from rollout.tools import PythonTool, ShellTool, submit

python = PythonTool(timeout_s=20)
shell = ShellTool(timeout_s=20)  # in the same sandbox, the trajectory's

QUESTION = "How many of the numbers below 1000 are prime?"
PROGRAM = """
def is_prime(n):
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))

with open("primes.txt", "w") as file:
    for n in range(1000):
        if is_prime(n):
            print(n, file=file)
"""
SCRIPT = (
    Scenario()
    .reply("prime", tool_call("python", code=PROGRAM))
    .then(tool_call("shell", command="wc -l < primes.txt"))
    .then(tool_call("submit", answer="168"))
)


def reward(trajectory: rollout.Trajectory) -> float:
    """1 for the right answer, as it was submitted."""
    return float(trajectory.extra.get("answer") == trajectory.prompt.ground_truth)


async def main() -> None:
    prompt = rollout.Prompt(messages=[{"role": "user", "content": QUESTION}], ground_truth="168")
    tools = [python, shell, submit]
    async with rollout.open_rollout(SCRIPT.config(), tools=tools, reward=reward) as runtime:
        batch = await runtime.generate([prompt])
    for message in batch.trajectories[0].messages:
        called = ", ".join(call.name for call in message.tool_calls or ())
        print(f"{message.role:<10} {(message.content or '').strip() or f'calls {called}'}")
    print(f"reward     {batch.samples[0].reward:g}")


if __name__ == "__main__":
    anyio.run(main)
