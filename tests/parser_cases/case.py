"""One text of a turn and what a parser must make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollout.types import InvalidToolCall, ToolCall


class Good(NamedTuple):
    """A call; its raw text is checked where it is given, its id where it is not the parser's."""

    name: str
    arguments: Mapping[str, Any] = {}
    id: str | None = None
    raw: str | None = None


class Bad(NamedTuple):
    """What stands in the place of a call, and a part of the reason why it is none."""

    raw: str
    reason: str


class Case(NamedTuple):
    """Named by what happens in it."""

    name: str
    text: str
    content: str = ""
    calls: Sequence[Good | Bad] = ()
    reasoning: str | None = None
    in_reasoning: bool = False


def invalid(name: str, text: str, reason: str) -> Case:
    """A text that stands as a whole in the place of one call."""
    return Case(name, text, calls=[Bad(text, reason)])


def seen(calls: Sequence[ToolCall | InvalidToolCall], case: Case) -> list[Good | Bad]:
    """The parsed calls in the terms of the case."""
    found: list[Good | Bad] = []
    for at, call in enumerate(calls):
        wanted = case.calls[at] if at < len(case.calls) else None
        if isinstance(call, InvalidToolCall):
            reason = call.reason
            if isinstance(wanted, Bad) and wanted.reason in reason:
                reason = wanted.reason
            found.append(Bad(call.raw, reason))
            continue
        has_raw = isinstance(wanted, Good) and wanted.raw is not None
        call_id = None if call.id == f"call_{at}" else call.id
        found.append(Good(call.name, call.arguments, call_id, call.raw if has_raw else None))
    return found


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """An OpenAI-style function dict."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool(
        "weather",
        city={"type": "string"},
        days={"type": "integer"},
        precise={"type": "boolean"},
        unit={"enum": ["celsius", "kelvin"]},
    ),
    tool(
        "search",
        query={"type": "string"},
        k={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        ratio={"type": "number"},
        tags={"type": "array", "items": {"type": "string"}},
        filters={"type": "object"},
        level={"enum": [1, 2, 3]},
        point={"$ref": "#/$defs/Point"},
        anything={"description": "no type"},
    ),
    tool("now"),
]
