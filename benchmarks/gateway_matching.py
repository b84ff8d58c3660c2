"""What it takes to find the place of a long request: microseconds, without HTTP and without tokens.

python benchmarks/gateway_matching.py
"""

from __future__ import annotations

import json
import statistics
import time  # noqa: TID251  (what is measured is wall time)
from typing import Any

import msgspec

from rollout.gateway.calls import GatewayCall, GivenCall, GivenMessage
from rollout.gateway.identity import reasoning_key, said_key
from rollout.gateway.request import matched
from rollout.gateway.tree import Tree, Turn

#: As recorded of a coding agent: 171 messages of 205 KB after 85 turns, 60 KB of tools.
TURNS, BYTES, TOOL_BYTES = 85, 205_000, 60_000


def tools_of(size: int) -> tuple[dict[str, Any], ...]:
    """Schemas of so many bytes."""
    parameters = {
        "type": "object",
        "properties": {f"field_{at}": {"type": "string", "minLength": 1} for at in range(8)},
        "required": ["field_1"],
    }
    words = "Does something to a file, and says what came of it. " * 30
    tool = {"type": "function", "function": {"description": words, "parameters": parameters}}
    count = max(1, size // len(json.dumps(tool)))
    return tuple(
        {**tool, "function": {**tool["function"], "name": f"tool_{at}"}}  # type: ignore[dict-item]
        for at in range(count)
    )


def recorded(turns: int, size: int) -> tuple[Tree, GatewayCall]:
    """A tree with a conversation of so many turns, and the call that continues it."""
    text = "x" * (size // (2 * turns))
    tree, tools = Tree(is_reasoning_needed=False), tools_of(TOOL_BYTES)
    messages = [GivenMessage(role="user", text="Work.")]
    for at in range(turns):
        call = GatewayCall(api="chat", messages=tuple(messages), tools=tools)
        request = matched(call, tree)
        calls = [("edit", {"path": f"src/file_{at}.py", "old": text[:200], "line": at})]
        turn = Turn(object(), at, reasoning=reasoning_key("Hm."), ids=frozenset())
        tree.add(request.found.node, [said_key(text, calls)], turn)
        given = tuple(GivenCall(name, value, f"call_{at}") for name, value in calls)
        messages += [
            GivenMessage(role="assistant", text=text, reasoning="Hm.", calls=given),
            GivenMessage(role="tool", text=text, call_id=f"call_{at}"),
        ]
    return tree, GatewayCall(api="chat", messages=tuple(messages), tools=tools)


def match_us(turns: int = TURNS, size: int = BYTES, repeats: int = 50) -> float:
    """Median microseconds to find the place of a request with so many turns of so many bytes.

    The request is parsed from JSON each time, outside of what is measured, as a server gets it.
    """
    tree, call = recorded(turns, size)
    body, decoder = msgspec.json.encode(call), msgspec.json.Decoder(GatewayCall)
    took: list[float] = []
    for _ in range(repeats):
        fresh = decoder.decode(body)
        started = time.perf_counter()
        request = matched(fresh, tree)
        took.append(time.perf_counter() - started)
        assert request.found.depth == 2 * turns
    return statistics.median(took) * 1e6


if __name__ == "__main__":
    print(json.dumps({"match_us_85_turns": round(match_us(), 1)}))
