"""The items of OpenAI's responses: what the model thought, said and called, as clients get it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.gateway.apis.response_items import (
    CALL_ID,
    MESSAGE_ID,
    REASONING_ID,
    sealed,
)
from rollout.gateway.apis.writing import arguments_text, text_input

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.types import ToolCall


class _Origin(NamedTuple):
    """How the client knows a tool."""

    name: str
    space: str
    is_text: bool


class Tools:
    """The tools of a body, under the names that the model sees.

    Attributes:
        schemas: As `GatewayCall.tools`.
    """

    def __init__(self) -> None:
        self.schemas: list[Mapping[str, Any]] = []
        self._origins: dict[str, _Origin] = {}

    def add(
        self, schema: Mapping[str, Any], name: str, space: str, *, is_text: bool = False
    ) -> None:
        """Offer a tool; one of a namespace has that in its name."""
        flat = self.flat_name(name, space)
        function = {**schema["function"], "name": flat}
        self.schemas.append({**schema, "function": function})
        self._origins[flat] = _Origin(name, space, is_text)

    def update(self, other: Tools) -> None:
        """Offer those of another collection too."""
        self.schemas += other.schemas
        self._origins |= other._origins

    @property
    def of_text(self) -> frozenset[str]:
        """Names of those that take plain text, for the model."""
        return frozenset(name for name, origin in self._origins.items() if origin.is_text)

    @staticmethod
    def flat_name(name: str, space: str | None) -> str:
        """The name of a tool for the model."""
        return f"{space.rstrip('_')}__{name}" if space else name

    def item(self, call: ToolCall) -> dict[str, Any]:
        """A call in the form of the tool that it is of."""
        origin = self._origins.get(call.name, _Origin(call.name, "", False))
        item = {"id": f"{CALL_ID}{call.id}", "call_id": call.id, "name": origin.name}
        if origin.space:
            item["namespace"] = origin.space
        if origin.is_text:
            text = text_input(call)
            return {"type": "custom_tool_call", **item, "input": text, "status": "completed"}
        arguments = arguments_text(call)
        return {"type": "function_call", **item, "arguments": arguments, "status": "completed"}


def reasoning_item(answer_id: str, text: str) -> dict[str, Any]:
    """What the model thought."""
    return {
        "type": "reasoning",
        "id": f"{REASONING_ID}{answer_id}",
        # Some clients show summaries only, others give back nothing but the thought itself.
        "summary": [{"type": "summary_text", "text": text}],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": sealed(answer_id, text),
        "status": "completed",
    }


def message_item(answer_id: str, text: str, log_probs: Sequence[Any]) -> dict[str, Any]:
    """What the model said."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}
    return {
        "type": "message",
        "id": f"{MESSAGE_ID}{answer_id}",
        "role": "assistant",
        "content": [part],
        "status": "completed",
    }


def opened(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """An item as it is added, before it is filled."""
    return {**item, **_EMPTY[item["type"]], "status": "in_progress"}


_EMPTY: Mapping[str, Mapping[str, Any]] = {
    "reasoning": {"summary": [], "content": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}
