"""LangGraph's prebuilt agent on exact tokens, without HTTP.

python examples/langgraph_agent/run.py

A scripted engine stands in for a model. Needs the extra `langgraph`.
"""

import anyio
from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent

import rollout
from rollout.integrations.langgraph import GraphAgent, RolloutChatModel
from rollout.testing import Scenario, tool_call


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def build(model: RolloutChatModel) -> object:
    """The graph of one trajectory."""
    return create_react_agent(model, [multiply], prompt="Compute with the tools.")


rollout.register_agent("react")(GraphAgent(build, config={"recursion_limit": 20}))

SCRIPT = (
    Scenario()
    .reply("6 times 7", tool_call("multiply", a=6, b=7))
    .then(tool_call("multiply", a=42, b=2))
    .then("It is 84.")
)


def reward(trajectory: rollout.Trajectory) -> float:
    """1 for the right answer."""
    return float(trajectory.prompt.ground_truth in trajectory.answer)


async def main() -> None:
    question = {"role": "user", "content": "What is 6 times 7, doubled?"}
    prompt = rollout.Prompt(messages=[question], ground_truth="84", agent_name="react")
    async with rollout.open_rollout(SCRIPT.config(), reward=reward) as runtime:
        batch = await runtime.generate([prompt])
    for message in batch.trajectories[0].messages:
        called = ", ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
        print(f"{message.role:<10} {message.content or called}")
    print(f"rows {len(batch)}, reward {batch.samples[0].reward:g}")


if __name__ == "__main__":
    anyio.run(main)
