"""One turn of a conversation: how it is generated, parsed and answered."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.chat.messages import read_tool_call
from rollout.chat.parsers.registry import END_TOKENS
from rollout.errors import AgentError, TemplateError
from rollout.types import InvalidToolCall, Message, ToolCall
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.chat import ChatTemplate, ToolParser
    from rollout.engine.pool.generation import Generation
    from rollout.tools import ToolResult

_CALL = "expected {'name': …, 'arguments': …}, or OpenAI's form of a call"
#: Keys of a call beside its arguments.
_BESIDE_ARGUMENTS = frozenset(("name", "id", "type", "index"))


class StopStrings:
    """Ends a turn where its decoded text first contains one of several strings.

    What is kept are the tokens up to and with the one that completes the string; the engine is
    told to abort, and what it sampled beyond is dropped.

    Args:
        strings: At least one, none empty.
        decode: Ids to text, special tokens included.

    Attributes:
        found: The string that ended it; of several that end in the same token the one that begins
            first. None where the model ended it.
        scope: Of the generation, which it cancels.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.found: str | None = None
        self._pattern = re.compile("|".join(map(re.escape, sorted(strings))))
        self._decode = decode
        #: A string of so many bytes has no more tokens; a few more for those that are in pieces.
        self._window = max(len(each.encode()) for each in strings) + 8
        self._seen = 0
        self.scope = anyio.CancelScope()

    def __call__(self, generation: Generation) -> None:
        """Look at what is new."""
        ids = generation.ids
        recent = ids[max(0, min(self._seen, len(ids)) - self._window) :]
        self._seen = len(ids)
        if generation.kept is None and self._pattern.search(self._decode(recent)):
            self._end(generation)

    def before(self, text: str) -> str:
        """What of a text stands before the string that ended it; all where none did."""
        return text if self.found is None else text[: text.find(self.found)]

    def _end(self, generation: Generation) -> None:
        """Find the last token that is kept, and have the engine stop."""
        ids = generation.ids

        def find(count: int) -> re.Match[str] | None:
            return self._pattern.search(self._decode(ids[:count]))

        if find(len(ids)) is None:
            return  # the window began within a character
        kept = 1 + bisect_left(range(1, len(ids)), True, key=lambda n: bool(find(n)))
        generation.kept, found = kept, find(kept)
        self.found = found and found.group()
        self.scope.cancel()


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What the model generated in one turn, parsed.

    Attributes:
        content: Its text without reasoning, calls and special tokens.
        reasoning: Its reasoning, where the format has any.
        calls: Tool calls and what stood in their place, in order; empty where the turn was cut.
        text: Everything it sampled, decoded, special tokens included.
        cut_by: What ended the generation before the model did: the path of a length
            (``lengths.turn``) or of a deadline (``limits.generation_s``), "abort" or "error";
            else None.
        written: The content with the text of invalid calls where the model wrote it; None where no
            call is invalid.
    """

    content: str
    reasoning: str | None
    calls: tuple[ToolCall | InvalidToolCall, ...]
    text: str
    cut_by: str | None = None
    written: str | None = None


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What the model sampled in one generation, T tokens, not parsed.

    Attributes:
        ids: (T,) int32, packed.
        log_probs: (T,) float32, packed: of each id.
        versions: Runs ``(weight version, number of ids)`` that add up to T.
        finish_reason: "stop" or "length".
        cut_by: As `AssistantTurn.cut_by`.
    """

    ids: array[int]
    log_probs: array[float]
    versions: tuple[tuple[int, int], ...]
    finish_reason: str
    cut_by: str | None = None


class TurnReader:
    """Decodes and parses turns: the same tokens make the same turn."""

    def __init__(
        self, template: ChatTemplate, parser: ToolParser, schemas: Sequence[Mapping[str, Any]]
    ) -> None:
        self.parser, self.schemas, self.decode = parser, schemas, template.encoder.decode
        own = getattr(parser, "stop_tokens", ())
        self._own_end: str = next(iter(own), "")
        ends = {*template.stop_token_ids, *template.token_ids(END_TOKENS)}
        spelled = {token: template.decode([token]) for token in ends}
        #: Of tokens that end a turn and that the parser does not leave out.
        self._foreign_ends = {token: text for token, text in spelled.items() if text not in own}

    def read_ids(self, ids: array[int], cut_by: str | None, *, in_reasoning: bool) -> AssistantTurn:
        """Read a turn; the calls of one that was cut are dropped.

        Parsers leave out an end token of their format, so that they get one in place of another:
        only an id ends a turn, and spellings in the text before it are content.
        """
        text = self.decode(ids)
        end = self._foreign_ends.get(ids[-1]) if ids else None
        if end is None:
            return self.read_text(text, cut_by, in_reasoning=in_reasoning)
        parsed = text.removesuffix(end) + self._own_end
        turn = self.read_text(parsed, cut_by, in_reasoning=in_reasoning)
        return msgspec.structs.replace(turn, text=text)

    def read_text(self, text: str, cut_by: str | None, *, in_reasoning: bool) -> AssistantTurn:
        """Read the text of a turn."""
        parsed = self.parser.parse(text, self.schemas, in_reasoning=in_reasoning)
        is_cut = cut_by is not None
        return AssistantTurn(
            content=parsed.content,
            reasoning=parsed.reasoning,
            calls=() if is_cut else parsed.calls,
            text=text,
            cut_by=cut_by,
            written=None if is_cut else parsed.written,
        )


def make_message(turn: AssistantTurn) -> Message:
    """The message of a turn; calls that could not be parsed stay in its content, as written."""
    invalid = [call.raw for call in turn.calls if isinstance(call, InvalidToolCall)]
    return Message(
        role="assistant",
        content=encodable(turn.written or "\n".join(filter(None, [turn.content, *invalid]))),
        tool_calls=tuple(call for call in turn.calls if isinstance(call, ToolCall)),
    )


def answer(call: ToolCall | InvalidToolCall, result: ToolResult) -> Message:
    """The message that tells the model what became of a call."""
    if isinstance(call, InvalidToolCall):
        return Message(role="tool", content=result.text, extra=result.extra)
    shown = (*result.images, *result.videos)
    return Message(
        role="tool",
        content=result.text,
        name=call.name,
        tool_call_id=call.id or None,
        extra=result.extra,
        parts=(*shown, *filter(None, [result.text])) if shown else (),
    )


def read_calls(what: str, calls: object) -> Sequence[ToolCall | InvalidToolCall]:
    """The calls that an agent gives, those in dicts as records; themselves where all are records.

    Args:
        what: Who was given them, for messages.
        calls: Records, ``{"name": …, "arguments": …}``, or OpenAI's ``{"id": …, "type":
            "function", "function": {"name": …, "arguments": …}}``; arguments are a mapping, or JSON
            of one.

    Raises:
        AgentError: One of them is neither.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise AgentError(f"{what}: calls = {calls!r:.80}; expected a list of calls")
    if all(isinstance(each, ToolCall | InvalidToolCall) for each in calls):
        return calls
    return [_read_call(f"{what}: calls[{at}]", call) for at, call in enumerate(calls)]


def _read_call(where: str, call: Any) -> ToolCall | InvalidToolCall:
    if isinstance(call, ToolCall | InvalidToolCall):
        return call
    try:
        read = read_tool_call(where, call)
    except TemplateError as error:
        raise AgentError(f"{error}; {_CALL}") from None
    function = call.get("function") or call
    others = sorted(map(str, {*function} - _BESIDE_ARGUMENTS))
    if others and "arguments" not in function:
        raise AgentError(f"{where} has no arguments, but {', '.join(others)}; {_CALL}")
    return read
