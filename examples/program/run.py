"""A whole program as an agent: a command line for each trajectory, in its sandbox.

python examples/program/run.py

The program speaks HTTP with the gateway, and with nothing else. A scripted engine stands in for a
model. Needs the extra `gateway`.
"""

import anyio

import rollout
from rollout.testing import Scenario

#: Any program that reads OPENAI_BASE_URL would do; this one needs nothing but Python.
PROGRAM = """
import json, os, sys, urllib.request

def ask(messages):
    body = json.dumps({"model": os.environ["ROLLOUT_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]

messages = [{"role": "user", "content": sys.argv[1]}]
messages.append(ask(messages))
messages.append({"role": "user", "content": "Now in one word."})
with open("answer.txt", "w") as file:
    file.write(ask(messages)["content"])
"""
SCRIPT = Scenario().reply("capital", "The capital of Peru is Lima.").then("Lima")

rollout.register_agent("two_questions")(
    rollout.ProgramAgent(
        "python3 agent.py {prompt}", files={"agent.py": PROGRAM}, collect=["answer.txt"]
    )
)


def reward(trajectory: rollout.Trajectory) -> float:
    """1 for the right answer in the file that the program left."""
    return float(trajectory.extra["files"]["answer.txt"] == trajectory.prompt.ground_truth)


async def main() -> None:
    question = {"role": "user", "content": "What is the capital of Peru?"}
    prompt = rollout.Prompt(messages=[question], ground_truth="Lima", agent_name="two_questions")
    async with rollout.open_rollout(SCRIPT.config(), reward=reward) as runtime:
        batch = await runtime.generate([prompt])
    trajectory = batch.trajectories[0]
    for message in trajectory.messages:
        print(f"{message.role:<10} {message.content}")
    print(f"rows {len(batch)}, reward {trajectory.reward:g}")


if __name__ == "__main__":
    anyio.run(main)
