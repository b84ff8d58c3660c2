"""An agent that goes beyond its context: full, it writes notes and continues from them.

python examples/compaction/run.py

A scripted engine stands in for a model. Its tokens are bytes, so that a row of 2048 is soon full.
"""

import anyio

import rollout
from rollout.config import AgentConfig, LengthsConfig
from rollout.testing import Scenario, tool_call

PAGES = {1: "The treaty was signed in Aix.", 2: "The year was 1748.", 3: "The month was October."}


@rollout.function_tool
def read_page(number: int) -> str:
    """Read a page of the archive.

    Args:
        number: Which one, from 1.
    """
    return f"{PAGES[number]} {'And so it is written. ' * 20}"


NOTES = "Notes: Aix, 1748; page 3 is left."
SCRIPT = (
    Scenario()
    .reply("little room left", NOTES)
    .reply(NOTES, tool_call("read_page", number=3))
    .then("In Aix, in October 1748.")
    .reply("treaty", tool_call("read_page", number=1))
    .then(tool_call("read_page", number=2))
    .then(tool_call("read_page", number=3))
)


async def main() -> None:
    config = SCRIPT.config(
        agent=AgentConfig(name="compacting_agent", compaction_room=512),
        lengths=LengthsConfig(prompt=2048, response=1800),
    )
    prompt = {"role": "user", "content": "Where and when was the treaty signed? Read pages 1 to 3."}
    async with rollout.open_rollout(config, tools=[read_page]) as runtime:
        batch = await runtime.generate([rollout.Prompt(messages=[prompt])])
    for sample, segment in zip(batch.samples, batch.trajectories[0].segments, strict=True):
        trained = int(batch.tensors["response_mask"][sample.row].sum())
        print(f"row {sample.row}: {segment.purpose}, {trained} trained tokens")
        for message in segment.messages:
            called = "".join(f"calls {call.name}" for call in message.tool_calls)
            print(f"  {message.role:<10} {(message.content or called)[:70]!r}")
    print(f"answer: {batch.trajectories[0].answer}")


if __name__ == "__main__":
    anyio.run(main)
