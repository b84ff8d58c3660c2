"""The messages of a conversation, as where their tokens are: decoded when somebody reads them."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec

from rollout.agents.turn import AssistantTurn, written_content
from rollout.chat.parsers.registry import END_TOKENS
from rollout.types import Message, ToolCall

if TYPE_CHECKING:
    from array import array

    from rollout.chat import ChatTemplate, ToolParser
    from rollout.token_prefix import TokenPrefix

#: A turn without words.
SILENCE = AssistantTurn(content="", reasoning=None, calls=(), text="")

#: What is said of a message whose text is in tokens: their row, start and stop. Then, of one that
#: the model was told, how far from the end of their text its own begins, and how long it is; of a
#: turn of the model's how it was said, and nothing.
_PLACE = struct.Struct("=iiiii")
_NO_ROW = -1
_IS_CUT, _IN_REASONING, _IS_SILENT = 1, 2, 4


_NOWHERE = _PLACE.pack(_NO_ROW, 0, 0, 0, 0)


class TurnReader(NamedTuple):
    """Decodes and parses what a model said: of the same tokens it makes the same turn."""

    template: ChatTemplate
    parser: ToolParser
    schemas: Sequence[Mapping[str, Any]]

    def turn(self, ids: array[int], cut_by: str | None, *, in_reasoning: bool) -> AssistantTurn:
        """What the model said; the calls of a turn that was cut are dropped."""
        text = self.template.decode(ids)
        end = self._find_other_end(ids)
        if not end:
            return self.read(text, cut_by, in_reasoning=in_reasoning)
        own = next(iter(getattr(self.parser, "stop_tokens", ())), "")
        turn = self.read(text.removesuffix(end) + own, cut_by, in_reasoning=in_reasoning)
        return msgspec.structs.replace(turn, text=text)

    def read(self, text: str, cut_by: str | None, *, in_reasoning: bool) -> AssistantTurn:
        """The same of its text."""
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

    def _find_other_end(self, ids: array[int]) -> str:
        """The end token that the last id is, unless it is one of the format's own.

        Parsers leave out one of their own at the end, so that they are given one in its place: only
        an id ends a turn, and spellings in the text before it are content.
        """
        template = self.template
        ends = (*template.stop_token_ids, *template.token_ids(END_TOKENS))
        if not len(ids) or ids[-1] not in ends:
            return ""
        text = template.decode(ids[-1:])
        return "" if text in getattr(self.parser, "stop_tokens", ()) else text


class _Head(NamedTuple):
    """A message without its text, which is in tokens."""

    role: str
    name: str | None
    tool_call_id: str | None


class _Plain(NamedTuple):
    """A message of nothing but a text."""

    role: str
    content: str | None


class PackedMessages(msgspec.Struct, frozen=True, array_like=True):
    """Messages as plain data; see `KeptMessages.packed`.

    Attributes:
        entries: Of each what is not in its tokens.
        places: Where those are.
        rows: The numbers of the rows that the places speak of.
    """

    entries: Sequence[Any]
    places: bytes
    rows: list[int]


class KeptMessages(Sequence[Message]):
    """Messages that are only ever appended.

    What the model said is decoded and parsed again when it is read, what it was told is decoded:
    both give what stood there byte for byte. Texts that tokens do not spell exactly are kept. Once
    somebody has read here, what was read and what is said stays at hand until `settle`.
    """

    __slots__ = ("_entries", "_is_read", "_is_settled", "_places", "_read", "_reader", "_rows")

    def __init__(self, reader: TurnReader) -> None:
        self._reader = reader
        #: Of each message what is not in its tokens; None of what the model said. A list would have
        #: room for nearly as many more.
        self._entries: tuple[Message | _Head | _Plain | None, ...] = ()
        self._places = b""
        self._rows: tuple[TokenPrefix, ...] = ()
        self._read: dict[int, Message | AssistantTurn] | None = None
        self._is_read = False
        self._is_settled = False

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> list[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | list[Message]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        entry = self._entries[at]
        if entry is None:
            return _message_of(self.turn(at))
        if isinstance(entry, _Plain):
            return Message(role=entry.role, content=entry.content)
        return self._told(at, entry)

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        if not isinstance(other, KeptMessages | list | tuple):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __add__(self, others: Iterable[Message]) -> list[Message]:
        return [*self, *others]

    def __radd__(self, others: Iterable[Message]) -> list[Message]:
        return [*others, *self]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # who gets it elsewhere has no tokenizer

    @property
    def decode(self) -> Callable[[Sequence[int]], str]:
        """Ids to text, by the tokenizer that wrote them."""
        return self._reader.template.decode

    @property
    def said(self) -> list[int]:
        """The places of what the model said."""
        return [at for at, entry in enumerate(self._entries) if entry is None]

    def turn(self, at: int) -> AssistantTurn:
        """What the model said in the message at this place, parsed."""
        self._is_read = True
        known = self._known(at)
        if isinstance(known, AssistantTurn):
            return known
        row, start, stop, manner, _ = self._place(at)
        if manner & _IS_SILENT:
            return SILENCE
        turn = self._reader.turn(
            self._rows[row].slice(start, stop),
            "" if manner & _IS_CUT else None,  # what cut it is of no use any more
            in_reasoning=bool(manner & _IN_REASONING),
        )
        self._remember(at, turn)
        return turn

    def say(
        self, turn: AssistantTurn, tokens: TokenPrefix, start: int, *, in_reasoning: bool
    ) -> None:
        """The model said the ids from `start` on, which are this turn."""
        self._drop_unread()
        manner = (_IS_CUT if turn.cut_by is not None else 0) | (in_reasoning * _IN_REASONING)
        self._keep(None, tokens, start, manner, 0)
        self._remember(len(self) - 1, turn)

    def stay_silent(self) -> None:
        """The model said nothing, and it was its turn."""
        self._entries += (None,)
        self._places += _PLACE.pack(_NO_ROW, 0, 0, _IS_SILENT, 0)

    def add(self, messages: Iterable[Message]) -> None:
        """Messages whose texts are kept as they are."""
        added = tuple(map(_as_plain, messages))
        self._entries += added
        self._places += _NOWHERE * len(added)

    def hear(
        self, messages: Sequence[Message], tokens: TokenPrefix, start: int, found: Sequence[int]
    ) -> None:
        """Messages that the ids from `start` on are of.

        Args:
            messages: In order.
            tokens: What they are in, up to its end.
            start: Where they begin.
            found: How far from its end the text of each begins in that of these ids; -1 where it
                does not stand there exactly.
        """
        self._drop_unread()
        for message, from_end in zip(messages, found, strict=True):
            if from_end < 0 or message.content is None:
                self.add([message])
            else:
                self._keep(_head_of(message), tokens, start, from_end, len(message.content))

    def fork(self, count: int) -> KeptMessages:
        """The first `count` of them, to be continued otherwise."""
        forked = KeptMessages(self._reader)
        forked._entries = self._entries[:count]
        forked._places = self._places[: _PLACE.size * count]
        forked._rows = self._rows
        return forked

    def packed(
        self, rows: Mapping[int, int], pack: Callable[[Message], Any]
    ) -> PackedMessages | None:
        """All of them, without what their tokens say; None where they are of other rows.

        Args:
            rows: Numbers of the rows by the identity of their `TokenPrefix`.
            pack: Makes plain data of a message.
        """
        numbers = []
        for row in self._rows:
            number = rows.get(id(row))
            if number is None:
                return None
            numbers.append(number)
        entries: Sequence[Any] = self._entries
        if Message in map(type, entries):  # seldom
            entries = [pack(each) if type(each) is Message else each for each in entries]
        return PackedMessages(entries, self._places, numbers)

    @classmethod
    def from_packed(
        cls,
        packed: PackedMessages,
        rows: Sequence[TokenPrefix],
        reader: TurnReader,
        unpack: Callable[[Any], Message],
    ) -> KeptMessages:
        """Those that were `packed`, of these rows."""
        made = cls(reader)
        made._entries = tuple([_entry(each, unpack) for each in packed.entries])
        made._places = packed.places
        made._rows = tuple(rows[number] for number in packed.rows)
        made._is_settled = True
        return made

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Of the tools that could be called."""
        return self._reader.schemas

    def settle(self) -> None:
        """Nothing that can be made again is kept from now on, whatever the reader."""
        self._read, self._is_settled = None, True

    def _keep(
        self, entry: Message | _Head | None, tokens: TokenPrefix, start: int, *more: int
    ) -> None:
        if not self._rows or self._rows[-1] is not tokens:
            self._rows = (*self._rows, tokens)
        self._entries += (entry,)
        self._places += _PLACE.pack(len(self._rows) - 1, start, len(tokens), *more)

    def _place(self, at: int) -> tuple[int, ...]:
        return _PLACE.unpack_from(self._places, _PLACE.size * at)

    def _told(self, at: int, entry: Message | _Head) -> Message:
        row, start, stop, from_end, length = self._place(at)
        if isinstance(entry, Message) and row == _NO_ROW:
            return entry
        self._is_read = True
        known = self._known(at)
        if isinstance(known, Message):
            return known
        text = self._reader.template.decode(self._rows[row].slice(start, stop))
        begin = len(text) - from_end
        content = text[begin : begin + length]
        if isinstance(entry, _Head):
            message = Message(content=content, **entry._asdict())
        else:
            message = _with_text(entry, content)
        self._remember(at, message)
        return message

    def _known(self, at: int) -> Message | AssistantTurn | None:
        return None if self._read is None else self._read.get(at)

    def _remember(self, at: int, value: Message | AssistantTurn) -> None:
        if not self._is_settled:
            self._read = self._read or {}
            self._read[at] = value

    def _drop_unread(self) -> None:
        """The last turn, where nobody reads."""
        if not self._is_read:
            self._read = None


def pack_texts(entries: list[Any]) -> PackedMessages:
    """Messages that stand in no tokens, each packed already."""
    return PackedMessages(entries, _NOWHERE * len(entries), [])


def _entry(packed: Any, unpack: Callable[[Any], Message]) -> Message | _Head | _Plain | None:
    if packed is None:
        return None
    if len(packed) == len(_Plain._fields):
        return _Plain(*packed)
    return _Head(*packed) if len(packed) == len(_Head._fields) else unpack(packed)


def find_texts(messages: Sequence[Message], text: str) -> list[int]:
    """How far from its end the text of each message begins in `text`; -1 where it is not there."""
    return [-1 if each.parts else _from_end(each.content, text) for each in messages]


def _as_plain(message: Message) -> Message | _Plain:
    is_plain = message == Message(role=message.role, content=message.content)
    return _Plain(message.role, message.content) if is_plain else message


def _from_end(content: str | None, text: str) -> int:
    at = -1 if content is None else text.rfind(content)
    return -1 if at < 0 else len(text) - at


def _message_of(turn: AssistantTurn) -> Message:
    calls = tuple(call for call in turn.calls if isinstance(call, ToolCall))
    return Message(role="assistant", content=written_content(turn), tool_calls=calls)


def _with_text(message: Message, content: str | None) -> Message:
    own = {name: getattr(message, name) for name in message.__struct_fields__}
    return Message(**own | {"content": content})


def _head_of(message: Message) -> Message | _Head:
    if message.tool_calls or message.extra or message.fields:
        return _with_text(message, None)
    return _head(message.role, message.name, message.tool_call_id)


@lru_cache(256)
def _head(role: str, name: str | None, tool_call_id: str | None) -> _Head:
    intern = sys.intern
    return _Head(intern(role), name and intern(name), tool_call_id and intern(tool_call_id))
