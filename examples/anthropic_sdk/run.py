"""An agent that is a loop over the `anthropic` SDK.

python examples/anthropic_sdk/run.py

A scripted engine stands in for a model. Needs the extra `gateway` and the package `anthropic`.
"""

import anyio
from anthropic import AsyncAnthropic

import rollout
from rollout.testing import Scenario, tool_call

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def weather(city: str) -> str:
    """What the tool answers."""
    return f"{city}: 19 degrees, cloudy"


@rollout.agent("anthropic_sdk")
async def run(task: rollout.AgentTask) -> float:
    """One trajectory; returns its reward."""
    messages = [*task.messages]
    async with AsyncAnthropic(base_url=task.root_url, api_key=task.api_key) as client:
        while True:
            answer = await client.messages.create(
                model=task.model, max_tokens=1024, messages=messages, tools=[WEATHER]
            )
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                text = "".join(block.text for block in answer.content if block.type == "text")
                return float(task.prompt.ground_truth in text)
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})


SCRIPT = (
    Scenario()
    .reply("weather", tool_call("weather", city="Lima"))
    .then("It is 19 degrees and cloudy in Lima.")
)


async def main() -> None:
    question = {"role": "user", "content": "What is the weather in Lima?"}
    prompt = rollout.Prompt(messages=[question], ground_truth="19", agent_name="anthropic_sdk")
    async with rollout.open_rollout(SCRIPT.config()) as runtime:
        batch = await runtime.generate([prompt])
    for message in batch.trajectories[0].messages:
        called = ", ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
        print(f"{message.role:<10} {message.content or called}")
    print(f"rows {len(batch)}, reward {batch.samples[0].reward:g}")


if __name__ == "__main__":
    anyio.run(main)
