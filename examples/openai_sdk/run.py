"""An agent that is a loop over the `openai` SDK.

python examples/openai_sdk/run.py

A scripted engine stands in for a model. Needs the extra `gateway` and the package `openai`.
"""

import json

import anyio
from openai import AsyncOpenAI

import rollout
from rollout.testing import Scenario, tool_call

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def weather(city: str) -> str:
    """What the tool answers."""
    return f"{city}: 19 degrees, cloudy"


@rollout.agent("openai_sdk")
async def run(task: rollout.AgentTask) -> float:
    """One trajectory; returns its reward."""
    messages = [*task.messages]
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        while True:
            answer = await client.chat.completions.create(
                model=task.model, messages=messages, tools=[WEATHER]
            )
            said = answer.choices[0].message
            messages.append(said)
            if not said.tool_calls:
                return float(task.prompt.ground_truth in (said.content or ""))
            for call in said.tool_calls:
                result = weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


SCRIPT = (
    Scenario()
    .reply("weather", tool_call("weather", city="Lima"))
    .then("It is 19 degrees and cloudy in Lima.")
)


async def main() -> None:
    question = {"role": "user", "content": "What is the weather in Lima?"}
    prompt = rollout.Prompt(messages=[question], ground_truth="19", agent_name="openai_sdk")
    async with rollout.open_rollout(SCRIPT.config()) as runtime:
        batch = await runtime.generate([prompt])
    for message in batch.trajectories[0].messages:
        called = ", ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
        print(f"{message.role:<10} {message.content or called}")
    print(f"rows {len(batch)}, reward {batch.samples[0].reward:g}")


if __name__ == "__main__":
    anyio.run(main)
