"""An agent of the OpenAI Agents SDK.

python examples/openai_agents/run.py

A scripted engine stands in for a model. Needs the extra `gateway` and the package `openai-agents`.
"""

import anyio
from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

import rollout
from rollout.testing import Scenario, tool_call


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: 19 degrees, cloudy"


@rollout.agent("openai_agents")
async def run(task: rollout.AgentTask) -> float:
    """One trajectory; returns its reward."""
    reporter = Agent(
        name="reporter",
        instructions="Answer with the tools.",
        tools=[weather],
        model=task.model,
        model_settings=ModelSettings(temperature=1.0),
    )
    # A client of its own: that which the SDK keeps for all belongs to one event loop for ever.
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        provider = OpenAIProvider(openai_client=client, use_responses=True)
        settings = RunConfig(model_provider=provider, tracing_disabled=True)
        result = await Runner.run(reporter, task.messages, run_config=settings)
    return float(task.prompt.ground_truth in result.final_output)


SCRIPT = (
    Scenario()
    .reply("weather", tool_call("weather", city="Lima"))
    .then("It is 19 degrees and cloudy in Lima.")
)


async def main() -> None:
    question = {"role": "user", "content": "What is the weather in Lima?"}
    prompt = rollout.Prompt(messages=[question], ground_truth="19", agent_name="openai_agents")
    async with rollout.open_rollout(SCRIPT.config()) as runtime:
        batch = await runtime.generate([prompt])
    for message in batch.trajectories[0].messages:
        called = ", ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
        print(f"{message.role:<10} {message.content or called}")
    print(f"rows {len(batch)}, reward {batch.samples[0].reward:g}")


if __name__ == "__main__":
    anyio.run(main)
