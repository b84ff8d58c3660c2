"""gpt-oss: messages of the harmony format, each with a channel and perhaps a recipient."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.chat.parsers.json_calls import (
    FaultyCall,
    arguments_of,
    skip_space,
    value_at,
    whole_value,
)
from rollout.chat.parsers.registry import ParsedTurn, register_tool_parser
from rollout.chat.parsers.scan import MAX_TAGS, TooManyCalls, TurnScan, find_last_calls

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_TOKEN = re.compile(r"<\|(start|channel|constrain|message|end|call|return)\|>")
_RECIPIENT = re.compile(r"(?<!\S)to=([^\s<]*)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([A-Za-z]*)")
_END = re.compile(r"<\|(?:end|call|return)\|>")
_PIECE = r"[^<]{0,300}"
_HEADER = rf"(?:<\|channel\|>{_PIECE})?(?:<\|constrain\|>{_PIECE})?<\|message\|>"
#: A header and what opens its message.
_WHOLE = re.compile(rf"\s*(?:<\|start\|>{_PIECE})?{_HEADER}")
#: What a turn begins with, unless it has no header.
_FIRST = re.compile(
    rf"\s*+(?:(?:assistant\s*)?<\|(?:start|channel|message)\|>|{_PIECE}to={_PIECE}(?:<\||\Z))"
)
#: What follows a token where it is no word of the model's: most of them, and two.
_AFTER_END = re.compile(r"(?:\s*<\|(?:end|call|return)\|>){0,3}+\s*(?:<\|(?:start|channel)\|>|\Z)")
_REAL = {
    "start": re.compile(rf"{_PIECE}(?:{_HEADER}|<\|channel\|>{_PIECE}\Z|(?<=\w)\Z)"),
    "channel": re.compile(rf"{_PIECE}(?:<\|constrain\|>{_PIECE})?<\|message\|>"),
}
#: Tokens that end no message. A header inside analysis that nothing closed is a draft.
_IN_BODY = ("message", "constrain")
_IN_ANALYSIS = (*_IN_BODY, "channel")
#: Recipients that are no tools.
_PEOPLE = ("", "assistant", "user", "all")


class _Message(NamedTuple):
    """Where a message starts, its body lies, and what ended it: a token's name or ""."""

    start: int
    body: int
    stop: int
    end: str
    channel: str
    recipient: str


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
        scan = TurnScan(text, tools)
        try:
            for message in _messages(text, in_reasoning):
                _add(scan, message)
        except TooManyCalls as error:
            scan.refuse_calls(error)
        return scan.turn("\n")


def _messages(text: str, in_reasoning: bool) -> Iterator[_Message]:
    is_plain = not in_reasoning and _FIRST.match(text) is None
    start, body = 0, 0 if in_reasoning or is_plain else -1
    channel, recipient = ("analysis" if in_reasoning else ""), ""
    end_of_call = 0
    for token in itertools.islice(_TOKEN.finditer(text), MAX_TAGS):
        kind = token[1]
        if token.start() < end_of_call:
            continue  # in the JSON of a call
        if body < 0 and kind == "message":
            body = token.end()
            channel, recipient = _header(text[start : token.start()])
            if channel != "analysis" and recipient not in _PEOPLE:
                end_of_call = _end_of_call(text, body)
        elif _is_spoken_of(text, token) and body >= 0 and channel != "analysis" and not end_of_call:
            continue
        elif body >= 0 and kind not in (_IN_ANALYSIS if channel == "analysis" else _IN_BODY):
            yield _Message(start, body, token.start(), kind, channel, recipient)
            end_of_call = 0
            start, body = (token.start() if kind in ("start", "channel") else token.end()), -1
        elif body < 0 and kind in ("start", "end", "call", "return"):
            yield from _unfinished(text, start, token.start())
            start = token.start() if kind == "start" else token.end()
    if body >= 0:
        yield _Message(start, body, len(text), "", channel, recipient)
    else:
        yield from _unfinished(text, start, len(text))


def _is_spoken_of(text: str, token: re.Match[str]) -> bool:
    return _REAL.get(token[1], _AFTER_END).match(text, token.end()) is None


def _end_of_call(text: str, body: int) -> int:
    """Where the JSON of a call ends; of faulty JSON before messages that are whole, to the end.

    Other messages after it may be quoted in it.
    """
    try:
        return value_at(text, skip_space(text, body))[1]
    except FaultyCall as error:
        return len(text) if error.is_cut else find_last_calls(text, body, _END, _skip_message)


def _skip_message(text: str, at: int) -> int:
    message = _WHOLE.match(text, at)
    if message is None:
        if skip_space(text, at) == len(text):
            return len(text)
        raise FaultyCall("no message follows", at)
    at = message.end()
    is_call = _header(message[0])[1] not in _PEOPLE
    if is_call:
        try:
            at = skip_space(text, value_at(text, skip_space(text, at))[1])
        except FaultyCall as error:
            raise FaultyCall(str(error), at) from None
    end = _END.search(text, at)
    if end is None:
        return len(text)
    if is_call and end.start() != at:
        raise FaultyCall("more text follows the call", at)
    return end.end()


def _header(text: str) -> tuple[str, str]:
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    name = recipient[1].removeprefix("functions.") if recipient is not None else ""
    if recipient is not None and not name:
        name = "functions."
    return (channel[1].lower() if channel is not None else ""), name


def _unfinished(text: str, start: int, stop: int) -> Iterator[_Message]:
    """A header without a message: a call of nothing, or plain text without any header."""
    header = text[start:stop]
    channel, recipient = _header(header)
    if recipient not in _PEOPLE:
        yield _Message(start, stop, stop, "header", channel, recipient)
    elif "<|" not in header and start == 0:
        yield _Message(start, start, stop, "", "", "")


def _add(scan: TurnScan, message: _Message) -> None:
    if message.channel == "analysis":
        if message.end != "call" or message.recipient in _PEOPLE:
            scan.add_reasoning(message.body, message.stop)
        else:
            reason = "a call on the analysis channel is not executed; use the commentary channel"
            scan.add_invalid(message.start, message.stop, reason)
    elif message.recipient in _PEOPLE:
        scan.add_content(message.body, message.stop)
    else:
        _add_call(scan, message)


def _add_call(scan: TurnScan, message: _Message) -> None:
    try:
        if message.end == "header":
            raise FaultyCall("the call has no message")
        if message.recipient == "functions.":
            raise FaultyCall("the recipient names no function")
        arguments = arguments_of(whole_value(scan.text[message.body : message.stop]))
    except FaultyCall as error:
        scan.add_invalid(message.start, message.stop, str(error))
    else:
        scan.add_call(message.start, message.stop, message.recipient, arguments)
