"""Search over local passages: a retriever with BM25, and the tool that asks it.

    python examples/local_search/run.py

A scripted engine stands in for a model: it searches, reads what was found, and answers.
"""

from __future__ import annotations

import threading

import anyio
from retriever import serve

import rollout
from rollout.testing import Scenario, tool_call
from rollout.tools import SearchTool

PASSAGES = [
    {"id": "owls", "title": "Owls", "contents": "Owls hunt at night, and fly without a sound."},
    {"id": "larks", "title": "Larks", "contents": "Larks sing at dawn, high above the fields."},
    {"id": "whales", "contents": "Whales are mammals that live in the sea."},
]


def reward(trajectory: rollout.Trajectory) -> float:
    """Whether the answer names the right animal."""
    return float("owl" in str(trajectory.messages[-1].content).lower())


async def main() -> None:
    server = serve(PASSAGES)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    scenario = (
        Scenario(seed=1)
        .reply("Who hunts at night?", tool_call("search", query="hunts at night", top_k=1))
        .then("An owl.")
    )
    prompt = rollout.Prompt(messages=[{"role": "user", "content": "Who hunts at night?"}])
    tool = SearchTool(f"http://127.0.0.1:{server.server_port}/retrieve")
    async with rollout.open_rollout(scenario.config(), [tool], reward) as runtime:
        batch = await runtime.generate([prompt])
    server.shutdown()
    (trajectory,) = batch.trajectories
    found = next(m.content for m in trajectory.messages if m.role == "tool")
    print(found)
    print(f"reward {trajectory.reward}")


if __name__ == "__main__":
    anyio.run(main)
