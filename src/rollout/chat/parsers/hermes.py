"""The Hermes format, also that of Qwen: ``<tool_call>{"name": …, "arguments": …}</tool_call>``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rollout.chat.parsers.json_calls import (
    UnterminatedError,
    call_from_value,
    first_value,
    skip_space,
)
from rollout.chat.parsers.registry import ParsedTurn, register_tool_parser
from rollout.chat.parsers.text import without_end
from rollout.types import InvalidToolCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"

_OPENING = re.compile(f"{THINK}|{CALL}")
_TAG = re.compile(f"{CALL}|{END_CALL}")


@register_tool_parser("hermes")
class HermesParser:
    """Reads reasoning and calls in the order written, in time linear in the text.

    Reasoning is ``<think>…</think>``, anywhere outside a call; a call drafted inside it is never
    a call. What is never closed reaches to the end. A call ends at the ``</tool_call>`` after
    its JSON, so that arguments may contain tags.
    """

    def parse(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        in_reasoning: bool = False,
    ) -> ParsedTurn:
        """See `ToolParser.parse`; this format needs no `tools`."""
        scan = _Scan(without_end(text))
        at = scan.read_reasoning(0) if in_reasoning else 0
        while at < len(scan.text):
            at = scan.read_next(at)
        return scan.turn()


class _Scan:
    """One pass over one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall | InvalidToolCall] = []

    def turn(self) -> ParsedTurn:
        return ParsedTurn(
            content="".join(self._content).strip(),
            reasoning="\n".join(self._reasoning) if self._reasoning else None,
            calls=tuple(self._calls),
        )

    def read_next(self, at: int) -> int:
        """Read content up to the next tag and what the tag opens; return the position after it."""
        opening = _OPENING.search(self.text, at)
        if opening is None:
            self._content.append(self.text[at:])
            return len(self.text)
        self._content.append(self.text[at : opening.start()])
        if opening[0] == THINK:
            return self.read_reasoning(opening.end())
        return self._read_call(opening.start(), opening.end())

    def read_reasoning(self, start: int) -> int:
        end = self.text.find(END_THINK, start)
        stop = len(self.text) if end < 0 else end
        # A model may open reasoning again although its prompt did.
        self._reasoning.append(self.text[start:stop].strip().removeprefix(THINK).strip())
        return stop + len(END_THINK)

    def _read_call(self, start: int, body: int) -> int:
        """Read the call whose tag stands at `start` and whose JSON begins at `body`."""
        body = skip_space(self.text, body)
        try:
            value, stop = self._value(body)
        except ValueError as error:
            return self._add_invalid(start, self.text.find(END_CALL, body), str(error))
        follower = skip_space(self.text, stop)
        if self.text.startswith(CALL, follower):
            return self._add_unclosed(start, stop)
        end = self.text.find(END_CALL, follower)
        if end != follower:
            return self._add_invalid(start, end, "malformed JSON: more text follows the call")
        return self._add_call(start, end, value)

    def _value(self, body: int) -> tuple[object, int]:
        """The JSON at `body` and where it ends.

        Only the text up to the next tag is read, so that a fault costs no more than its own call.
        A tag inside a string ends nothing: then twice as much is read, up to a later tag.
        """
        window = 0
        while (tag := _TAG.search(self.text, body + 2 * window)) is not None:
            window = tag.start() - body
            try:
                value, length = first_value(self.text[body : body + window])
            except UnterminatedError:
                window += 1
            else:
                return value, body + length
        value, length = first_value(self.text[body:])
        return value, body + length

    def _add_call(self, start: int, end: int, value: object) -> int:
        stop = end + len(END_CALL)
        raw = self.text[start:stop]
        try:
            call = call_from_value(value, call_id=f"call_{len(self._calls)}", raw=raw)
        except ValueError as error:
            return self._add_invalid(start, end, str(error))
        self._calls.append(call)
        return stop

    def _add_invalid(self, start: int, end: int, reason: str) -> int:
        """Record what stands at `start` up to the tag at `end`; -1: there is none."""
        if end < 0:
            return self._add_unclosed(start, len(self.text))
        stop = end + len(END_CALL)
        self._calls.append(InvalidToolCall(raw=self.text[start:stop], reason=reason))
        return stop

    def _add_unclosed(self, start: int, stop: int) -> int:
        reason = f"the call is not closed by {END_CALL}"
        self._calls.append(InvalidToolCall(raw=self.text[start:stop], reason=reason))
        return stop
