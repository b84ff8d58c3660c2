"""What it takes to recognise a long conversation, and whether changed ones are told apart."""

from __future__ import annotations

import copy
import json
import statistics
import time  # noqa: TID251  (what is measured)
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from driver_cases.workload import SCHEMAS, said_texts, tool_text

from rollout.gateway.apis import chat
from rollout.gateway.message_keys import hash_reasoning, hash_turn
from rollout.gateway.turn_index import Turn, TurnIndex

if TYPE_CHECKING:
    from collections.abc import Callable

TURNS = 85
Messages = list[dict[str, Any]]


def conversation(turns: int) -> Messages:
    """A question, and as many turns that call a tool, each answered but the last one."""
    messages: Messages = [{"role": "user", "content": "Where is it?"}]
    texts = said_texts()[1]
    for number in range(turns):
        arguments = {"query": f"né {number}", "top_k": number, "more": {"a": [1, 2], "b": None}}
        call = {
            "id": f"call_{number:024}",
            "type": "function",
            "function": {"name": "search", "arguments": json.dumps(arguments)},
        }
        messages += [
            {
                "role": "assistant",
                "content": f"{number}: {texts[number % len(texts)]}",
                "reasoning_content": f"Hm, {number}.",
                "tool_calls": [call],
            },
            {"role": "tool", "tool_call_id": call["id"], "content": f"{number} {tool_text()}"},
        ]
    return messages


class Recognised:
    """An index in which the turns of a conversation were generated."""

    def __init__(self, messages: Messages) -> None:
        self.index = TurnIndex(is_reasoning_needed=False)
        row: Any = SimpleNamespace(transcript=())
        turns = [at for at, each in enumerate(messages) if each["role"] == "assistant"]
        for at in turns:
            said = messages[at]
            calls = [
                (each["function"]["name"], json.loads(each["function"]["arguments"]))
                for each in said["tool_calls"]
            ]
            ids = frozenset(each["id"][-24:] for each in said["tool_calls"])
            turn = Turn(
                conversation=row,
                stop=0,
                content=hash_turn(said["content"], calls),
                reasoning=hash_reasoning(said["reasoning_content"]),
                ids=ids,
            )
            self.index.add(self.find(body_of(messages[:at])), turn)
        self.depth = turns[-1] + 1

    def find(self, body: bytes) -> Any:
        """The request of a body, in its place."""
        return self.index.match(chat.read_request(body, {}).call)


def body_of(messages: Messages) -> bytes:
    """As a client sends it."""
    return json.dumps({"model": "rollout", "messages": messages, "tools": SCHEMAS}).encode()


def match_us(rounds: int) -> dict[str, float]:
    """To find a request of 85 turns in its index, and to read its body: medians, microseconds."""
    messages = conversation(TURNS)
    known, body = Recognised(messages), body_of(messages)
    reading, matching = [], []
    for _ in range(rounds):
        began = time.process_time()
        call = chat.read_request(body, {}).call
        read = time.process_time()
        found = known.index.match(call)
        matching.append(time.process_time() - read)
        reading.append(read - began)
        if found.depth != known.depth:
            raise SystemExit("the conversation was not recognised")
    return {
        "match_us_85_turns": statistics.median(matching) * 1e6,
        "read_us_85_turns": statistics.median(reading) * 1e6,
    }


def _calls(change: Callable[[Any], str]) -> Callable[[dict[str, Any]], None]:
    """Writes arguments otherwise."""

    def act(message: dict[str, Any]) -> None:
        function = message["tool_calls"][0]["function"]
        function["arguments"] = change(json.loads(function["arguments"]))

    return act


def _set(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda message: message.update(fields)


def _sorted(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _sorted(value[key]) for key in sorted(value, reverse=True)}


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda message: message.pop(name, None)


def _renamed(message: dict[str, Any]) -> None:
    message["tool_calls"][0]["id"] = "own"


def _other_tool(message: dict[str, Any]) -> None:
    message["tool_calls"][0]["function"]["name"] = "look"


#: What clients make of a turn, and whether it is the same one.
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], bool]] = {
    "verbatim": (lambda message: None, True),
    "spaces": (_calls(lambda value: json.dumps(value, indent=2)), True),
    "compact": (_calls(lambda value: json.dumps(value, separators=(",", ":"))), True),
    "key order": (_calls(lambda value: json.dumps(_sorted(value))), True),
    "unicode": (_calls(lambda value: json.dumps(value, ensure_ascii=False)), True),
    "no reasoning": (_without("reasoning_content"), True),
    "trimmed": (lambda message: message.update(content=message["content"] + " \n"), True),
    "renamed id": (_renamed, True),
    "more fields": (_set(refusal=None, annotations=[], audio=None), True),
    "other words": (_set(content="No."), False),
    "no words": (_set(content=None), False),
    "other reasoning": (_set(reasoning_content="Ha."), False),
    "other arguments": (_calls(lambda value: json.dumps(value | {"top_k": -1})), False),
    "fewer arguments": (_calls(lambda value: json.dumps({"query": value["query"]})), False),
    "other tool": (_other_tool, False),
    "no calls": (_set(tool_calls=[]), False),
}


def _change(
    messages: list[dict[str, Any]], at: int, change: Callable[[dict[str, Any]], Any]
) -> None:
    """Change a turn; its results follow where its first call has another id."""
    before = [call["id"] for call in messages[at].get("tool_calls") or ()]
    change(messages[at])
    after = [call["id"] for call in messages[at].get("tool_calls") or ()]
    if before[:1] != after[:1] and after:
        for message in messages[at + 1 :]:
            if message["role"] == "assistant":
                break
            if message.get("tool_call_id") == before[0]:
                message["tool_call_id"] = after[0]


def errors() -> dict[str, Any]:
    """Turns that were taken for others, and turns that were not recognised."""
    messages = conversation(12)
    known = Recognised(messages)
    wrong: dict[str, list[str]] = {"forks_false": [], "matches_false": []}
    turns = [at for at, each in enumerate(messages) if each["role"] == "assistant"]
    for name, (change, is_same) in CHANGES.items():
        for at in turns:
            changed = copy.deepcopy(messages)
            _change(changed, at, change)
            is_found = known.find(body_of(changed)).depth == known.depth
            if is_found != is_same:
                wrong["matches_false" if is_found else "forks_false"].append(f"{name} at {at}")
    counts: dict[str, Any] = {name: len(found) for name, found in wrong.items()}
    return counts | {"wrong": [each for found in wrong.values() for each in found]}
