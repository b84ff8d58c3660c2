"""Messages as chat templates read them, checked before a template sees them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, TypeGuard

from rollout.errors import MediaError, TemplateError
from rollout.media import Media
from rollout.media import parts as media
from rollout.types import Message, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")

#: What messages have as a rule; other keys travel along.
_KNOWN_IN_ORDER = ("role", "content", "tool_calls", "tool_call_id", "name")
_KNOWN = frozenset(_KNOWN_IN_ORDER)
#: More messages may be work for a thread, however short they are.
_FEW = 64

#: A message in the form that chat templates read; `content` is a string, or, of a message with
#: media, a list of parts: ``{"type": "text", "text": …}``, ``{"type": "image", "image": Media}``.
TemplateMessage = dict[str, Any]


class TemplateMessages(list[TemplateMessage]):
    """Messages as `template_messages` makes them, so that they are checked and converted once.

    Attributes:
        extras: What each carries for others than the template.
        records: Those of them that were given as records of mere words; None in place of others.
    """

    __slots__ = ("extras", "records")

    def __init__(self) -> None:
        super().__init__()
        self.extras: list[Mapping[str, Any]] = []
        self.records: list[Message | None] = []

    def add(
        self, message: TemplateMessage, extra: Mapping[str, Any], record: Message | None = None
    ) -> None:
        """One more."""
        self.append(message)
        self.extras.append(extra)
        self.records.append(record)


def template_messages(messages: Iterable[Message | Mapping[str, Any]]) -> TemplateMessages:
    """The messages as dicts of plain values, each with a known role and a string as content.

    Keys of a mapping that are not ours travel along; keys whose value is None are dropped. A
    content that is a list of text parts becomes the joined text, that of an assistant message that
    only calls tools becomes "". Arguments of tool calls that are JSON text are parsed, so that a
    template does not encode them a second time. ``extra`` is not for templates and is kept apart.

    Raises:
        TemplateError: No messages, or one of them is malformed; says which and why.
    """
    if isinstance(messages, TemplateMessages):
        return messages
    if not _is_sequence(messages):
        raise TemplateError(f"messages must be a sequence of messages, not {_kind(messages)}")
    converted = TemplateMessages()
    for index, message in enumerate(messages):
        if is_mere_words(message):
            converted.add(_words(message), message.extra, message)
        else:
            converted.add(*_template_message(f"messages[{index}]", message))
    if not converted:
        raise TemplateError("messages is empty; expected at least one message")
    return converted


def words_of(messages: object) -> TemplateMessages | None:
    """As `template_messages` of a few messages of mere words in a list; None of anything else."""
    if type(messages) is not list or len(messages) > _FEW:
        return None
    converted = TemplateMessages()
    for message in messages:
        if not is_mere_words(message):
            return None
        converted.add(_words(message), message.extra, message)
    return converted or None


def is_mere_words(message: object) -> TypeGuard[Message]:
    """Whether it is a record of a text and nothing else, as those of users and tools mostly are."""
    return (
        type(message) is Message
        and type(message.content) is str
        and message.role in ROLES
        and type(message.extra) is dict
        and type(message.tool_calls) is tuple
        and type(message.fields) is dict
        and not (message.tool_calls or message.fields or message.parts)
    )


def _words(message: Message) -> TemplateMessage:
    fields = {"role": message.role, "content": message.content}
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        fields["name"] = message.name
    return fields


def _template_message(where: str, message: object) -> tuple[TemplateMessage, Mapping[str, Any]]:
    """One message, and what it carries for others."""
    fields = _fields(where, message)
    extra = _extra(where, fields.pop("extra", {}))
    role = fields.get("role")
    if role is None:
        raise TemplateError(f"{where} has no role; expected one of {', '.join(ROLES)}")
    if not isinstance(role, str) or role not in ROLES:
        raise TemplateError(f"{where}: unknown role {role!r}; expected one of {', '.join(ROLES)}")
    for name in fields.keys() - _KNOWN:
        _refuse_media(f"{where}.{name}", fields[name], is_media=name in media.FIELDS)
    if calls := _template_calls(where, fields.pop("tool_calls", ())):
        fields["tool_calls"] = calls
        fields.setdefault("content", "")
    fields["content"] = _content(f"{where} ({role})", fields.get("content"))
    return fields, extra


def _content(where: str, content: object) -> str | list[dict[str, Any]]:
    """A content as a template takes it: one string, or parts where there are media."""
    is_list = not isinstance(content, str) and _is_sequence(content)
    if not is_list or getattr(getattr(content, "dtype", None), "kind", "O") != "O":
        return text_of_content(where, content)
    parts: list[Any] = list(content)  # type: ignore[call-overload]
    found = [_medium_of(part) for part in parts]
    if not any(found):
        return text_of_content(where, parts)
    return [
        {"type": "text", "text": _part(f"{where}: content[{at}]", part)}
        if medium is None
        else {"type": medium.kind, medium.kind: medium}
        for at, (part, medium) in enumerate(zip(parts, found, strict=True))
    ]


def _medium_of(part: object) -> Media | None:
    held = part
    if isinstance(part, Mapping):
        kind = part.get("type")
        held = part.get(kind) if isinstance(kind, str) else None
    return held if isinstance(held, Media) else None


def media_of(messages: Iterable[TemplateMessage]) -> list[Media]:
    """The images and videos of messages, in order."""
    lists = (each["content"] for each in messages if isinstance(each["content"], list))
    return [held for parts in lists for part in parts if (held := _medium_of(part)) is not None]


def has_media(messages: Iterable[TemplateMessage]) -> bool:
    """Whether one of them holds an image or a video."""
    for message in messages:  # noqa: SIM110  (twice a turn; a generator takes four times as long)
        if isinstance(message["content"], list):
            return True
    return False


def text_in(content: str | list[dict[str, Any]]) -> str:
    """The text of a content in a template's form."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def text_of_content(where: str, content: object) -> str:
    """A content as one string; text parts are joined as they are.

    Raises:
        TemplateError: It is neither text nor parts of text; a `MediaError` where it holds media.
    """
    if isinstance(content, str):
        return content
    _refuse_media(f"{where}: content", content)
    if not _is_sequence(content):
        raise TemplateError(f"{where}: content must be a string, not {_kind(content)}")
    return "".join(_part(f"{where}: content[{at}]", part) for at, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
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


def _extra(where: str, extra: object) -> Mapping[str, Any]:
    if not isinstance(extra, Mapping):
        raise TemplateError(f"{where}: extra must be a mapping, not {_kind(extra)}")
    return extra


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


def _fields(where: str, message: object) -> TemplateMessage:
    if isinstance(message, Message):
        names = (*_KNOWN_IN_ORDER, "extra")
        own = {name: value for name in names if (value := getattr(message, name)) is not None}
        if message.parts:
            own["content"] = message.parts
        return own | {str(name): value for name, value in message.fields.items()}
    if isinstance(message, Mapping):
        return {str(name): value for name, value in message.items() if value is not None}
    raise TemplateError(f"{where} must be a Message or a mapping, not {_kind(message)}")


def _template_calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not _is_sequence(calls):
        raise TemplateError(f"{where}: tool_calls must be a sequence, not {_kind(calls)}")
    return [_template_call(where, at, call) for at, call in enumerate(calls)]


def _template_call(where: str, at: int, call: object) -> dict[str, Any]:
    where = f"{where}.tool_calls[{at}]"
    if isinstance(call, ToolCall):
        return template_call(call.id, call.name, dict(call.arguments))
    if not isinstance(call, Mapping):
        raise TemplateError(f"{where} must be a ToolCall or a mapping, not {_kind(call)}")
    function = call.get("function") or call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f"{where} names no function")
    arguments = _arguments(where, function.get("arguments"))
    return template_call(str(call.get("id") or ""), function["name"], arguments)


def template_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call in the form that chat templates read."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def with_arguments_as_text(messages: Iterable[TemplateMessage]) -> list[TemplateMessage]:
    """The messages with the arguments of each call as a string of JSON."""
    return [_with_calls(message, _with_text_arguments) for message in messages]


def with_nine_letter_ids(messages: Iterable[TemplateMessage]) -> list[TemplateMessage]:
    """The messages with ids of calls that are nine letters or digits, the same for the same id."""
    converted: list[TemplateMessage] = []
    results = 0
    for message in messages:
        results = results + 1 if message["role"] == "tool" else 0
        converted.append(_with_nine(message, results))
    return converted


def _with_nine(message: TemplateMessage, result: int) -> TemplateMessage:
    """`message` with nine-letter ids; it is the result of that number, from 1, or none."""
    if result:
        return {**message, "tool_call_id": _nine(message.get("tool_call_id"), result - 1)}
    number = itertools.count()
    return _with_calls(message, lambda call: {**call, "id": _nine(call["id"], next(number))})


def with_results_as_user(messages: Iterable[TemplateMessage]) -> list[TemplateMessage]:
    """The messages with each run of tool results as one user's words, joined to what he says."""
    converted: list[TemplateMessage] = []
    is_open = False  # whether the last message is made of results
    for message in messages:
        is_result = message["role"] == "tool"
        said = message["content"]
        content = _joined("```tool_output\n", said, "\n```") if is_result else said
        if is_open and message["role"] in ("tool", "user"):
            content = _joined(converted[-1]["content"], "\n", content)
            converted[-1] = {"role": "user", "content": content}
        else:
            converted.append({"role": "user", "content": content} if is_result else message)
        is_open = is_result
    return converted


def _joined(*contents: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Contents after each other; a string where all of them are."""
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return "".join(texts)
    return [part for each in contents for part in as_parts(each)]


def as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_calls(
    message: TemplateMessage, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> TemplateMessage:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else message


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _nine(call_id: object, number: int) -> str:
    if not call_id:
        return f"{number:09d}"
    text = str(call_id)
    is_nine = len(text) == 9 and text.isascii() and text.isalnum()
    return text if is_nine else hashlib.sha256(text.encode()).hexdigest()[:9]


def _arguments(where: str, arguments: object) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"{where}: arguments are not JSON: {error}") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise TemplateError(f"{where}: arguments must be an object, not {_kind(arguments)}")
    return arguments


def _is_sequence(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether `value` has items in order: also an array, as data sets hold them."""
    if type(value) in (list, tuple):
        return True
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def as_messages(messages: Iterable[Message | Mapping[str, Any]]) -> list[Message]:
    """The messages as records, e.g. for a trajectory's conversation.

    Raises:
        TemplateError: As `template_messages`.
    """
    plain = template_messages(messages)
    records = [record for record in plain.records if record is not None]
    if len(records) == len(plain):
        return records
    return [
        _record(fields, extra) if record is None else record
        for fields, extra, record in zip(plain, plain.extras, plain.records, strict=True)
    ]


def _record(fields: TemplateMessage, extra: Mapping[str, Any]) -> Message:
    calls = [(call["function"], call["id"]) for call in fields.get("tool_calls", ())]
    content = fields["content"]
    parts = content if isinstance(content, list) else []
    return Message(
        role=fields["role"],
        content=text_in(content),
        tool_calls=tuple(
            ToolCall(name=function["name"], arguments=function["arguments"], id=call_id)
            for function, call_id in calls
        ),
        tool_call_id=fields.get("tool_call_id"),
        name=fields.get("name"),
        extra=extra,
        fields={name: value for name, value in fields.items() if name not in _KNOWN},
        parts=tuple(_medium_of(part) or part["text"] for part in parts),
    )
