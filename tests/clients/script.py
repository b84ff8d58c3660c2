"""What the model says to most clients, and the tools that it calls."""

from __future__ import annotations

from typing import Any

from rollout.testing import Scenario

SYSTEM = "You know cities.\nBe brief."
QUESTION = "How many people live in Zürich and Genève?"
FOLLOWING = "And in  1900?"
ANSWER = "Together: 640 thousand — “more or less”."
LAST = "Far fewer."

#: Thoughts, text, and arguments that no serialiser writes: spaces, escapes, another order of keys.
FIRST_TURN = (
    "<think>\nTwo cities.\nOne after the other?\n</think>\n\nI look.\n\n"
    '<tool_call>\n{ "arguments" : {"note" :"a \\"b\\" \\/ c\\u00e9",\n  "city": "Z\\u00fcrich" },'
    '"name":"look_up"}\n</tool_call>'
)
#: Nothing but calls: clients see null content.
CALLS_ONLY = (
    '<tool_call>\n{"name": "look_up", "arguments": {"city":"Genève"}}\n</tool_call>\n'
    '<tool_call>\n{"name":"add",   "arguments":{"b": 2.0, "a":1}}\n</tool_call>'
)

DESCRIPTION = "Find how many people live in a city."
LOOK_UP: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "note": {"type": "string"}},
    "required": ["city"],
}
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}


def scenario() -> Scenario:
    """Three turns with calls and an answer, then one more question."""
    rules = Scenario(seed=3).reply(QUESTION, FIRST_TURN)
    return rules.then(CALLS_ONLY).then(ANSWER).then(f"<think>Hm.</think>{LAST}  \n")


class Tools:
    """The tools, with what they were called with."""

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []

    def look_up(self, city: str, note: str = "") -> str:
        """Find how many people live in a city."""
        self.called.append(("look_up", city, note))
        return f"{city}: 1 {note}".strip()

    def add(self, a: float, b: float) -> str:
        """Add."""
        self.called.append(("add", float(a), float(b)))
        return str(float(a) + float(b))

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call the one of this name."""
        return str(getattr(self, name)(**arguments))

    def assert_called(self) -> None:
        """As the script has it, whatever the client made of the arguments."""
        assert sorted(self.called) == [
            ("add", 1.0, 2.0),
            ("look_up", "Genève", ""),
            ("look_up", "Zürich", 'a "b" / cé'),
        ]
