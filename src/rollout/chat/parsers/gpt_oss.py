"""gpt-oss: messages of the harmony format, each with a channel and perhaps a recipient."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rollout.chat.parsers.json_calls import FaultyCall, read_arguments, read_json, read_json_text
from rollout.chat.parsers.registry import ParsedTurn, register_tool_parser
from rollout.chat.parsers.scan import MAX_TAGS, TooManyCalls, TurnScan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RECIPIENT = re.compile(r"(?<!\S)to=(?:functions\.(?=[^\s<]))?([^\s<]*)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([A-Za-z]*)")
_PIECE = r"[^<]{0,300}"
_HEADER = rf"(?:<\|channel\|>{_PIECE})?(?:<\|constrain\|>{_PIECE})?<\|message\|>"
_STOP = r"<\|(?:end|call|return)\|>"
#: What a turn begins with, unless it has no header.
_FIRST = re.compile(
    rf"\s*+(?:(?:assistant\s*)?<\|(?:start|channel|message)\|>|{_PIECE}to={_PIECE}(?:<\||\Z))"
)
#: What ends a header.
_END_OF_HEADER = re.compile(r"<\|(message|start|end|call|return)\|>")
#: What ends a message of analysis, in which a header is a draft, or that of a call, after its JSON.
_END = re.compile(r"<\|(start|end|call|return)\|>")
#: What ends any other message, unless it is spoken of: neither a message nor the end follows.
_END_OF_CONTENT = re.compile(
    rf"<\|(end|call|return)\|>(?=(?:\s*{_STOP}){{0,3}}+\s*(?:<\|(?:start|channel)\|>|\Z))"
    rf"|<\|(start)\|>(?={_PIECE}(?:{_HEADER}|<\|channel\|>{_PIECE}\Z|(?<=\w)\Z))"
    rf"|<\|(channel)\|>(?={_PIECE}(?:<\|constrain\|>{_PIECE})?<\|message\|>)"
)
_NESTED = re.compile(rf"(?P<opens><\|message\|>)|(?P<closes>{_STOP})")
#: Recipients that are no tools.
_PEOPLE = ("", "assistant", "user", "all")


@register_tool_parser("gpt_oss")
class GptOssParser:
    """Analysis is reasoning; a message with a recipient is a call; all else is content.

    The text continues where the prompt stopped, after ``<|start|>assistant``. Only ``<|end|>``,
    ``<|start|>`` and tokens that end the turn close a message of analysis. A call on the
    analysis channel is reasoning too and never executed; where it asks for an answer
    (``<|call|>``) it is an invalid call. Tokens inside the JSON of a call are part of it, and
    those that neither a message nor the end of the turn follows are content.
    """

    stop_tokens = ("<|return|>", "<|call|>")

    def parse(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        in_reasoning: bool = False,
    ) -> ParsedTurn:
        """See `ToolParser.parse`; `in_reasoning`: the prompt ended inside an analysis message."""
        scan, at = TurnScan(text, tools), 0
        with suppress(TooManyCalls):
            if in_reasoning:
                at = _read_message(scan, 0, 0, "<|channel|>analysis")
            elif _FIRST.match(text) is None:
                at = _read_message(scan, 0, 0, "")
            for _ in range(MAX_TAGS):
                if at == len(text):
                    break
                at = _read_next(scan, at)
            scan.add_content(at, len(text))
        return scan.build_turn("\n")


def _read_next(scan: TurnScan, start: int) -> int:
    """Read the header at `start` and its message, if any; return the position after them."""
    text = scan.text
    end = _END_OF_HEADER.search(text, start + text.startswith("<|start|>", start))
    stop = len(text) if end is None else end.start()
    header = text[start:stop]
    if end is not None and end[1] == "message":
        return _read_message(scan, start, end.end(), header)
    channel, recipient = _read_header(header)
    if recipient not in _PEOPLE and channel != "analysis":
        scan.add_invalid(start, stop, "the call has no message")
    elif "<|" not in header and start == 0:
        scan.add_content(start, stop)
    return stop if end is None or end[1] == "start" else end.end()


def _read_message(scan: TurnScan, start: int, body: int, header: str) -> int:
    """Add the message that stands at `body`; return the position after it."""
    channel, recipient = _read_header(header)
    is_analysis, is_call = channel == "analysis", recipient not in _PEOPLE
    is_json = is_call and not is_analysis
    ends = _END if is_analysis or is_call else _END_OF_CONTENT
    end = ends.search(scan.text, _find_end_of_json(scan, body) if is_json else body)
    stop, token = (len(scan.text), "") if end is None else (end.start(), end[0])
    if is_json:
        try:
            value = read_json_text(scan.text[body:stop])
        except FaultyCall as fault:
            scan.add_invalid(start, stop, str(fault))
        else:
            scan.add_json_call(start, stop, value, name=recipient)
    elif not is_analysis:
        scan.add_content(body, stop)
    elif is_call and token == "<|call|>":
        reason = "a call on the analysis channel is not executed; use the commentary channel"
        scan.add_invalid(start, stop, reason)
    else:
        scan.add_reasoning(scan.text[body:stop])
    return stop if token in ("", "<|start|>", "<|channel|>") else stop + len(token)


def _find_end_of_json(scan: TurnScan, body: int) -> int:
    """Where the JSON of a call ends; of faulty JSON where the message does that holds it."""
    try:
        value, stop = read_json(scan.text, scan.skip_space(body))
        if isinstance(value, str):  # a faulty one may have ended at a quote within
            read_arguments(value)
        return stop
    except FaultyCall as fault:
        nesting = scan.nesting(_NESTED)
        end = None if fault.is_cut else nesting.find_end(body)
        return len(scan.text) if end is None else nesting.spans[end][0]


def _read_header(text: str) -> tuple[str, str]:
    """The channel of a message, and its recipient without the namespace of functions."""
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    return channel[1].lower() if channel else "", recipient[1] if recipient else ""
