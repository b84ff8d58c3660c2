"""One pass over the text of a turn, and the formats that are read in one pass.

A format (`TaggedParser`) declares its tags, says which of them are meant as calls, and reads one
call from where its tag stands. A `TurnScan` holds the text and collects what has been read of it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from rollout.chat.parsers.json_calls import (
    FaultyCall,
    read_arguments,
    read_call_object,
    skip_space,
)
from rollout.chat.parsers.registry import ParsedTurn, read_function, strip_stop
from rollout.types import InvalidToolCall, ToolCall
from rollout.utf8 import encodable, is_encodable, is_name, list_texts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Calls of one turn, invalid ones included. A model that writes as many has lost its way.
MAX_CALLS = 128
#: Tags of one turn that are looked at; what stands after so many is content. No answer has as many,
#: and text that is nothing but tags costs no more than these.
MAX_TAGS = 10_000
#: Characters between tags in which an attempt at a call is recognized.
_MAX_ATTEMPT = 400
#: How JSON begins; the dots that stand for some in prose are none.
_JSON = re.compile(r"\s*+[{\[](?!\s*(?:\.\.\.|…))")
#: Dots in the place of a call, or of a value of its JSON; and strings, in which they mean nothing.
_DOTS = re.compile(r"(?:^|[:,{\[\s])(?:\.\.\.|…)(?=\s*(?:[],}]|$))")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
#: A word, or code that calls something.
_ATTEMPT = re.compile(r"\w\S*|\w[\w.]*\([^\n]*\)")


class Nesting:
    """Where the calls of a text open and close, those that are quoted in a value included.

    A value may quote whole calls, and lone tags of its own format. What is balanced in it is
    quoted; of end tags that nothing opened, the last one closes the value.

    Args:
        text: The turn.
        tags: Finds the tags, in groups ``opens``, ``closes`` and others, which do neither.
    """

    def __init__(self, text: str, tags: re.Pattern[str]) -> None:
        found = list(tags.finditer(text))
        #: The tags; the first stands for the beginning of the text.
        self.kinds = [None, *(tag.lastgroup for tag in found)]
        self.spans = [(0, 0), *(tag.span() for tag in found)]
        self.depths = list(
            accumulate((kind == "opens") - (kind == "closes") for kind in self.kinds)
        )
        #: Of each tag the first of the least depth from it on.
        self._lowest = list(range(len(found) + 1))
        for at in reversed(range(len(found))):
            if self.depths[self._lowest[at + 1]] < self.depths[at]:
                self._lowest[at] = self._lowest[at + 1]

    def find_before(self, at: int) -> int:
        """The index of the last tag before `at`."""
        return max(bisect_left(self.spans, (at, 0)) - 1, 0)

    def find_end(self, at: int) -> int | None:
        """The index of the tag that closes what is open at `at`; None where nothing does.

        It is the last one that nothing after `at` opened.
        """
        before = self.find_before(at)
        lowest = self._lowest[before]
        return lowest if self.depths[lowest] < self.depths[before] else None

    def find_stop(self, at: int) -> int | None:
        """Where what is open at `at` ends; None where nothing closes it."""
        end = self.find_end(at)
        return None if end is None else self.spans[end][1]


class TooManyCalls(Exception):
    """The turn has one call too many: what it holds now is one invalid call over all from there."""


class TurnScan:
    """What has been read of one text so far.

    Args:
        text: The turn without the tokens that end it.
        tools: OpenAI-style function dicts.

    Attributes:
        tool_names: Of the tools that are offered.
        end_of_call: Where the last call, or what belongs to it, ends; -1 before the first.
        is_at_line_start: Whether the line that content has reached is empty so far.
        is_in_fence: Whether content has opened a fence of Markdown that it has not closed.
    """

    def __init__(self, text: str, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self.text = text
        self.tools = tools or ()
        names = (read_function(tool).get("name") for tool in self.tools)
        self.tool_names = {name for name in names if isinstance(name, str)}
        self.end_of_call = -1
        self.is_at_line_start = True
        self.is_in_fence = False
        #: Content, and between it the text of each invalid call; whether it is content.
        self._pieces: list[tuple[str, bool]] = []
        self._nestings: dict[str, Nesting] = {}
        self._reasoning: list[str] = []
        self._calls: list[ToolCall | InvalidToolCall] = []
        self._ids: set[str] = set()

    def build_turn(self, separator: str = "") -> ParsedTurn:
        """The result, with pieces of content joined by `separator`."""
        content = [piece for piece, is_content in self._pieces if is_content]
        written = None
        if len(content) < len(self._pieces):
            written = encodable(separator.join(piece for piece, _ in self._pieces)).strip()
        return ParsedTurn(
            content=encodable(separator.join(content)).strip(),
            reasoning=encodable("\n".join(self._reasoning)) if self._reasoning else None,
            calls=tuple(self._calls),
            written=written,
        )

    def nesting(self, tags: re.Pattern[str]) -> Nesting:
        """Where calls open and close; see `Nesting`."""
        if tags.pattern not in self._nestings:  # a pattern hashes its whole code each time
            self._nestings[tags.pattern] = Nesting(self.text, tags)
        return self._nestings[tags.pattern]

    def skip_space(self, at: int) -> int:
        """The first position from `at` that is not white space."""
        return skip_space(self.text, at)

    def skip_tag(self, tag: str, at: int) -> int:
        """The position after `tag`, if any, where it stands next, white space aside; else `at`."""
        follower = self.skip_space(at)
        return follower + len(tag) if tag and self.text.startswith(tag, follower) else at

    def find(self, tag: str, at: int) -> int:
        """Where `tag` stands next, or the end of the text."""
        found = self.text.find(tag, at)
        return len(self.text) if found < 0 else found

    @property
    def is_empty(self) -> bool:
        """Whether there is no content and no call yet."""
        return not self._calls and all(piece.isspace() for piece, _ in self._pieces)

    def follows_call(self, at: int) -> bool:
        """Whether a call, or what closes it, stands right before `at`, white space aside."""
        return self.end_of_call >= 0 and self.skip_space(self.end_of_call) == at

    def has_ended(self, tag: str) -> bool:
        """Whether `tag` ends the last call, or what belongs to it."""
        return self.text.endswith(tag, 0, self.end_of_call)

    def end_call(self, at: int) -> int:
        """Let what ends at `at` belong to the call before it; return `at`."""
        self.end_of_call = at
        return at

    def is_meant(self, at: int, end: str) -> bool:
        """Whether what stands at `at`, between an opening tag and its `end`, was meant as a call.

        It begins as JSON without dots for a value, or it stands where templates put it: on lines of
        its own, or on the line that the tag begins, and is no sentence. Else the tag is spoken of.
        """
        is_json = _JSON.match(self.text, at) is not None
        if not (is_json or self.is_at_line_start or self.text.startswith("\n", at)):
            return False
        stop = self.text.find(end, at, at + _MAX_ATTEMPT)
        if stop < 0 or "<" in (body := self.text[at:stop]):
            return is_json
        if _DOTS.search(_STRING.sub('""', body)) is not None:
            return False
        if is_json or self.is_in_fence:
            return is_json
        is_tight = self.is_at_line_start and body == body.strip() and "\n" not in body
        return is_tight or _ATTEMPT.fullmatch(body.strip() or "_") is not None

    def add_content(self, start: int, stop: int) -> int:
        """Record the text from `start` to `stop` as content; return `stop`."""
        if start < stop:
            piece = self.text[start:stop]
            self._pieces.append((piece, True))
            self.is_at_line_start = piece.rstrip(" \t")[-1:] in ("", "\n")
            self.is_in_fence ^= piece.count("```") % 2 == 1
        return stop

    def add_reasoning(self, text: str) -> None:
        """Record reasoning, without white space around it."""
        self._reasoning.append(text.strip())

    def add_call(
        self, start: int, stop: int, name: str, arguments: Mapping[str, Any], call_id: object = None
    ) -> int:
        """Record a call and return `stop`; an id of the model's own stays where it is new.

        A call with what cannot be encoded is none: it could be rendered no more.
        """
        raw = self.text[start:stop]
        if "\\" in raw or not raw.isascii():  # no other spelling of what is no text
            texts = list_texts([name, arguments])
            if (half := next((text for text in texts if not is_encodable(text)), None)) is not None:
                return self.add_invalid(start, stop, f"half of a character in {half!r:.80}")
        if not is_name(call_id) or call_id.isspace() or call_id in self._ids:
            number = len(self._calls)
            while f"call_{number}" in self._ids:  # the model gave it to another
                number += 1
            call_id = f"call_{number}"
        self._ids.add(call_id)
        self._add(start, ToolCall(name=name, arguments=arguments, id=call_id, raw=raw))
        return self.end_call(stop)

    def add_json_call(
        self,
        start: int,
        stop: int,
        value: object,
        *keys: str,
        name: str = "",
        call_id: object = None,
    ) -> int:
        """Record the call that a JSON value describes, valid or not; return `stop`.

        It is the arguments of `name` where that stands outside the JSON, else a call whose `keys`
        are those of `read_call_object`.
        """
        try:
            if name:
                arguments = read_arguments(value)
            else:
                name, arguments, call_id = read_call_object(value, *keys)
        except FaultyCall as fault:
            return self.add_invalid(start, stop, str(fault))
        return self.add_call(start, stop, name, arguments, call_id)

    def add_invalid(self, start: int, stop: int, reason: str) -> int:
        """Record that what stands in the place of a call is none; return `stop`."""
        raw = self.text[start:stop]
        self._add(start, InvalidToolCall(raw=raw, reason=encodable(reason)))
        self._pieces.append((raw, False))
        return self.end_call(stop)

    def _add(self, start: int, call: ToolCall | InvalidToolCall) -> None:
        if len(self._calls) == MAX_CALLS:
            reason = f"more than {MAX_CALLS:,} calls in a turn; none is executed"
            raw = self.text[start:]
            self._calls = [InvalidToolCall(raw=raw, reason=reason)]
            self._pieces = [piece for piece in self._pieces if piece[1]] + [(raw, False)]
            raise TooManyCalls
        self._calls.append(call)


class TaggedParser(ABC):
    """A format in which tags open calls and reasoning; reads it in time linear in the text.

    Reasoning may stand anywhere outside a call, and a call drafted inside it is never a call.
    What is never closed reaches to the end. A closing tag of reasoning that nothing opened, neither
    the prompt nor the text, is text.

    Attributes:
        stop_tokens: Special tokens that end a turn in this format.
        reasoning_tags: Pairs of what opens and closes reasoning.
        opening: Regular expression of what may open a call.
        nested: Finds where calls open and close; see `Nesting`.
    """

    stop_tokens: ClassVar[tuple[str, ...]] = ()
    reasoning_tags: ClassVar[tuple[tuple[str, str], ...]] = (("<think>", "</think>"),)
    opening: ClassVar[str]
    nested: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    _tag: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        if "opening" in vars(cls):
            # No group around the tags: with one, `re` would try each place of a text instead of
            # searching for the character that all of them begin with.
            tags = [re.escape(tag) for pair in cls.reasoning_tags for tag in pair]
            cls._tag = re.compile("|".join([*tags, cls.opening]))

    @abstractmethod
    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        """Whether `opening` was meant to open a call, right or wrong; else it is content."""

    @abstractmethod
    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        """Read what `opening` opens into `scan`; return the position after it.

        Raises:
            FaultyCall: It is no call; it is recorded up to `find_end`.
        """

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        """Where a faulty call ends: with all that may be quoted in it, or before the next tag."""
        at = opening.end() if fault.is_open else fault.at
        stop = None if fault.is_cut else scan.nesting(self.nested).find_stop(at)
        if stop is not None:
            return stop
        is_before_tag = not fault.is_open and self._tag.match(scan.text, fault.at) is not None
        return fault.at if is_before_tag else len(scan.text)

    def parse(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        in_reasoning: bool = False,
    ) -> ParsedTurn:
        """See `ToolParser.parse`."""
        text = strip_stop(text, self.stop_tokens)
        if not in_reasoning and self._tag.search(text) is None:  # most turns: all is content
            return ParsedTurn(content=encodable(text).strip())
        scan = TurnScan(text, tools)
        with suppress(TooManyCalls):
            self._read(scan, in_reasoning)
        return scan.build_turn()

    def _read(self, scan: TurnScan, in_reasoning: bool) -> None:
        at = self._read_reasoning(scan, 0, self.reasoning_tags) if in_reasoning else 0
        closings = {closing for _, closing in self.reasoning_tags}
        for _ in range(MAX_TAGS):
            tag = self._tag.search(scan.text, at)
            if tag is None:
                break
            scan.add_content(at, tag.start())
            pairs = [pair for pair in self.reasoning_tags if tag[0] == pair[0]]
            if pairs:
                at = self._read_reasoning(scan, tag.end(), pairs)
            elif tag[0] in closings or not self.is_meant(scan, tag):
                at = scan.add_content(*tag.span())
            else:
                try:
                    at = self.read_call(scan, tag)
                except FaultyCall as fault:
                    at = scan.add_invalid(tag.start(), self.find_end(scan, tag, fault), str(fault))
        scan.add_content(at, len(scan.text))

    def _read_reasoning(self, scan: TurnScan, start: int, pairs: Sequence[tuple[str, str]]) -> int:
        """Read reasoning that one of `pairs` has opened before `start`."""
        stop, closing = min((scan.find(closing, start), closing) for _, closing in pairs)
        piece = scan.text[start:stop].strip()
        for opening, _ in pairs:  # the model may open again what the prompt has opened
            piece = piece.removeprefix(opening)
        scan.add_reasoning(piece)
        return stop + len(closing)
