"""Messages checked once, as records, and as chat templates read them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, TypeGuard

from rollout.errors import MediaError, TemplateError
from rollout.media import Media
from rollout.media import parts as media
from rollout.types import Message, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")
_KNOWN = ("role", "content", "tool_calls", "tool_call_id", "name", "extra")

#: A message in the form that chat templates read; `content` is a string, or, of a message with
#: media, a list of parts: ``{"type": "text", "text": …}``, ``{"type": "image", "image": Media}``.
TemplateMessage = dict[str, Any]


class Messages(Sequence[Message]):
    """The messages of a conversation, to be read; equal to a list of the same.

    Attributes:
        decode: Ids to text, by the tokenizer that encoded them.
    """

    __slots__ = ("_list", "decode")

    def __init__(self, known: list[Message], decode: Callable[[Sequence[int]], str]) -> None:
        self._list = known
        self.decode = decode

    def __len__(self) -> int:
        return len(self._list)

    def __getitem__(self, at: Any) -> Any:
        return self._list[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._list == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __add__(self, others: Iterable[Message]) -> list[Message]:
        return [*self, *others]

    def __radd__(self, others: Iterable[Message]) -> list[Message]:
        return [*others, *self]

    def __repr__(self) -> str:
        return repr(self._list)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._list,)  # who gets it elsewhere has no tokenizer


def as_messages(messages: Iterable[Message | Mapping[str, Any]]) -> list[Message]:
    """The messages as records, each with a known role and a string as content.

    Keys of a mapping that are not ours become `fields`; keys whose value is None are dropped. A
    content that is a list of text parts becomes the joined text, that of an assistant message that
    only calls tools becomes "". Arguments of tool calls that are JSON text are parsed, so that a
    template does not encode them a second time.

    Raises:
        TemplateError: No messages, or one of them is malformed; says which and why.
    """
    if not _is_sequence(messages):
        raise TemplateError(f"messages must be a sequence of messages, not {_kind(messages)}")
    read = [_read_message(f"messages[{at}]", message) for at, message in enumerate(messages)]
    if not read:
        raise TemplateError("messages is empty; expected at least one message")
    return read


def template_messages(messages: Iterable[Message | Mapping[str, Any]]) -> list[TemplateMessage]:
    """The same as dicts of plain values; ``extra`` is not for templates.

    Raises:
        TemplateError: As `as_messages`.
    """
    return [_write_message(message) for message in as_messages(messages)]


def _write_message(message: Message) -> TemplateMessage:
    content: str | list[dict[str, Any]] = message.content or ""
    if message.parts:
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": part.kind, part.kind: part}
            for part in message.parts
        ]
    written: TemplateMessage = {"role": message.role, "content": content}
    if message.tool_calls:
        written["tool_calls"] = [
            template_call(call.id, call.name, dict(call.arguments)) for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        written["name"] = message.name
    written.update(message.fields)
    return written


def _read_message(where: str, message: object) -> Message:
    fields: Mapping[Any, Any]
    if isinstance(message, Message):
        is_text = type(message.content) is str and message.role in ROLES
        is_plain = type(message.tool_calls) is tuple and type(message.extra) is dict
        if is_text and is_plain and not (message.tool_calls or message.fields or message.parts):
            return message  # as those of users and tools mostly are
        own = {name: getattr(message, name) for name in _KNOWN}
        fields = {**own, "content": message.parts or message.content, **message.fields}
    elif isinstance(message, Mapping):
        fields = message
    else:
        raise TemplateError(f"{where} must be a Message or a mapping, not {_kind(message)}")
    fields = {str(name): value for name, value in fields.items() if value is not None}
    role, extra = fields.get("role"), fields.get("extra", {})
    if not isinstance(extra, Mapping):
        raise TemplateError(f"{where}: extra must be a mapping, not {_kind(extra)}")
    if role not in ROLES:
        fault = " has no role" if role is None else f": unknown role {role!r}"
        raise TemplateError(f"{where}{fault}; expected one of {', '.join(ROLES)}")
    others = {name: value for name, value in fields.items() if name not in _KNOWN}
    for name, value in others.items():
        _refuse_media(f"{where}.{name}", value, is_media=name in media.FIELDS)
    calls = fields.get("tool_calls", ())
    if not _is_sequence(calls):
        raise TemplateError(f"{where}: tool_calls must be a sequence, not {_kind(calls)}")
    read = tuple(read_tool_call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(calls))
    parts = _read_parts(f"{where} ({role})", fields.get("content", "" if read else None))
    return Message(
        role=role,
        content="".join(part for part in parts if isinstance(part, str)),
        tool_calls=read,
        tool_call_id=fields.get("tool_call_id"),
        name=fields.get("name"),
        extra=extra,
        fields=others,
        parts=parts if any(isinstance(part, Media) for part in parts) else (),
    )


def _read_parts(where: str, content: object) -> tuple[str | Media, ...]:
    """The texts and media of a content, in order; of a string, itself."""
    if isinstance(content, str):
        return (content,)
    _refuse_media(f"{where}: content", content)
    if not _is_sequence(content):
        raise TemplateError(f"{where}: content must be a string, not {_kind(content)}")
    return tuple(_read_part(f"{where}: content[{at}]", part) for at, part in enumerate(content))


def _read_part(where: str, part: object) -> str | Media:
    if isinstance(part, str):
        return part
    if (medium := _find_medium(part)) is not None:
        return medium
    _refuse_media(where, part)
    if not isinstance(part, Mapping):
        raise TemplateError(f"{where} must be a text part, not {_kind(part)}")
    kind, text = part.get("type", "text"), part.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    problem = f"{where}: only parts of type 'text' are understood, not {kind!r:.80}"
    if isinstance(kind, str) and kind in media.PART_TYPES:
        raise MediaError(f"{problem}: {media.TEXT_ONLY}")
    raise TemplateError(problem)


def _find_medium(part: object) -> Media | None:
    if isinstance(part, Mapping):
        kind = part.get("type")
        part = part.get(kind) if isinstance(kind, str) else None
    return part if isinstance(part, Media) else None


def _refuse_media(where: str, value: object, *, is_media: bool = False) -> None:
    """Raise a `MediaError` where `value` is media, or has them by its name and is not empty."""
    kind = media.kind_of_media(value)
    dtype = getattr(value, "dtype", None)
    if dtype is not None and getattr(dtype, "kind", "") != "O":  # arrays of objects hold parts
        kind = f"an array of {dtype}"
    if kind is None and is_media and not (isinstance(value, Sized) and not len(value)):
        kind = _kind(value)
    if kind is not None:
        raise MediaError(f"{where} is {kind}; expected text: {media.TEXT_ONLY}")


def list_media(messages: Iterable[TemplateMessage]) -> list[Media]:
    """The images and videos of messages, in order."""
    lists = (each["content"] for each in messages if isinstance(each["content"], list))
    return [held for parts in lists for part in parts if (held := _find_medium(part)) is not None]


def text_in(content: str | list[dict[str, Any]]) -> str:
    """The text of a content in a template's form."""
    return "".join(part.get("text", "") for part in as_parts(content))


def text_of_content(where: str, content: object) -> str:
    """A content as one string; text parts are joined as they are.

    Raises:
        TemplateError: It is neither text nor parts of text; a `MediaError` where it holds media.
    """
    parts = _read_parts(where, content)
    for at, part in enumerate(parts):
        if isinstance(part, Media):
            raise MediaError(f"{where}: content[{at}] is a {part.kind}: {media.TEXT_ONLY}")
    return "".join(map(str, parts))


def read_tool_call(where: str, call: object) -> ToolCall:
    """Read a call: a record, ``{"name": …, "arguments": …}``, or OpenAI's form of it.

    Raises:
        TemplateError: It is none of these.
    """
    if isinstance(call, ToolCall):
        return ToolCall(name=call.name, arguments=dict(call.arguments), id=call.id)
    if not isinstance(call, Mapping):
        raise TemplateError(f"{where} must be a ToolCall or a mapping, not {_kind(call)}")
    function = call.get("function") or call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f"{where} names no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"{where}: arguments are not JSON: {error}") from error
    if not isinstance(arguments, Mapping | None):
        raise TemplateError(f"{where}: arguments must be an object, not {_kind(arguments)}")
    return ToolCall(name=function["name"], arguments=arguments or {}, id=str(call.get("id") or ""))


def template_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call in the form that chat templates read."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def with_arguments_as_text(messages: Iterable[TemplateMessage]) -> list[TemplateMessage]:
    """The messages with the arguments of each call as a string of JSON."""

    def write(call: dict[str, Any]) -> dict[str, Any]:
        function, arguments = call["function"], call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    return [
        {**message, "tool_calls": list(map(write, message["tool_calls"]))}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def with_nine_letter_ids(messages: Iterable[TemplateMessage]) -> list[TemplateMessage]:
    """The messages with ids of calls that are nine letters or digits, the same for the same id."""
    converted: list[TemplateMessage] = []
    results = -1  # the number of the last one in a row
    for message in messages:
        results = results + 1 if message["role"] == "tool" else -1
        own: TemplateMessage = {}
        if results >= 0:
            own["tool_call_id"] = _nine(message.get("tool_call_id"), results)
        elif calls := message.get("tool_calls"):
            own["tool_calls"] = [
                {**each, "id": _nine(each["id"], at)} for at, each in enumerate(calls)
            ]
        converted.append({**message, **own})
    return converted


def _nine(call_id: object, number: int) -> str:
    if not call_id:
        return f"{number:09d}"
    text = str(call_id)
    is_nine = len(text) == 9 and text.isascii() and text.isalnum()
    return text if is_nine else hashlib.sha256(text.encode()).hexdigest()[:9]


def with_results_as_user(messages: Iterable[TemplateMessage]) -> list[TemplateMessage]:
    """The messages with each run of tool results as one user's words, joined to what he says."""
    converted: list[TemplateMessage] = []
    is_open = False  # whether the last message is made of results
    for message in messages:
        is_result = message["role"] == "tool"
        content = message["content"]
        if is_result:
            content = join_contents("```tool_output\n", content, "\n```")
        if is_open and message["role"] in ("tool", "user"):
            content = join_contents(converted[-1]["content"], "\n", content)
            converted[-1] = {"role": "user", "content": content}
        else:
            converted.append({"role": "user", "content": content} if is_result else message)
        is_open = is_result
    return converted


#: How templates want calls and results: arguments as a string of JSON, which they write as it is
#: (DeepSeek); ids of calls of nine letters or digits (Mistral); no results (Gemma 2 and 3).
DIALECTS: dict[str, Callable[[Iterable[TemplateMessage]], list[TemplateMessage]]] = {
    "arguments as text": with_arguments_as_text,
    "ids of nine letters": with_nine_letter_ids,
    "results as words of the user": with_results_as_user,
}


def join_contents(*contents: str | Iterable[Any]) -> str | list[Any]:
    """Contents after each other; a string where all of them are."""
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return "".join(texts)
    return [part for each in contents for part in as_parts(each)]


def as_parts(content: str | Iterable[Any]) -> list[Any]:
    """A content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _is_sequence(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether `value` has items in order: also an array, as data sets hold them."""
    if type(value) in (list, tuple):  # as a rule, and the others take longer
        return True
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
