"""A tool agent with the tools of an MCP server; any server's command or URL does.

python examples/mcp_tools/run.py [KEY=VALUE ...]
"""

import sys
from pathlib import Path

import anyio

import rollout
from rollout.config import load_config
from rollout.tools import connect_mcp
from rollout.types import Message, Prompt, ToolCall

SERVER = [sys.executable, str(Path(__file__).with_name("server.py"))]
SYSTEM = Message(role="system", content="Look up the stock for every question.")


def example(item: str, pieces: str) -> list[Message]:
    """A small model learns the format of a call from examples."""
    call = ToolCall(name="in_stock", arguments={"item": item})
    return [
        Message(role="user", content=f"How many of {item} are there?"),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", name="in_stock", content=pieces),
        Message(role="assistant", content=f"There are {pieces}."),
    ]


def prompt(item: str) -> Prompt:
    question = Message(role="user", content=f"How many of {item} are there?")
    shown = [*example("plum", "0"), *example("fig", "12"), *example("lemon", "7")]
    return Prompt(messages=[SYSTEM, *shown, question], uid=item)


async def main() -> None:
    config = load_config("conf/quickstart.py", sys.argv[1:])
    async with (
        connect_mcp(SERVER) as tools,
        rollout.open_rollout(config, tools=tools) as runtime,
    ):
        batch = await runtime.generate([prompt("apple"), prompt("pear")])
    for sample in batch.samples:
        print(f"{sample.uid:<8} {sample.outcome.value}, {sample.metrics['tool_calls']:g} calls")


if __name__ == "__main__":
    anyio.run(main)
