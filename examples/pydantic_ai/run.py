"""An agent of pydantic-ai.

python examples/pydantic_ai/run.py

A scripted engine stands in for a model. Needs the extra `gateway` and the package
`pydantic-ai-slim[openai]`.
"""

import anyio
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import rollout
from rollout.testing import Scenario, tool_call


def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: 19 degrees, cloudy"


@rollout.agent("pydantic_ai")
async def run(task: rollout.AgentTask) -> float:
    """One trajectory; returns its reward."""
    provider = OpenAIProvider(base_url=task.base_url, api_key=task.api_key)
    model = OpenAIChatModel(task.model, provider=provider)
    reporter = Agent(model, instructions="Answer with the tools.", tools=[weather])
    result = await reporter.run(task.messages[-1]["content"])
    return float(task.prompt.ground_truth in result.output)


SCRIPT = (
    Scenario()
    .reply("weather", tool_call("weather", city="Lima"))
    .then("It is 19 degrees and cloudy in Lima.")
)


async def main() -> None:
    question = {"role": "user", "content": "What is the weather in Lima?"}
    prompt = rollout.Prompt(messages=[question], ground_truth="19", agent_name="pydantic_ai")
    async with rollout.open_rollout(SCRIPT.config()) as runtime:
        batch = await runtime.generate([prompt])
    for message in batch.trajectories[0].messages:
        called = ", ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
        print(f"{message.role:<10} {message.content or called}")
    print(f"rows {len(batch)}, reward {batch.samples[0].reward:g}")


if __name__ == "__main__":
    anyio.run(main)
