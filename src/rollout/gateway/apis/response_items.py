"""The items that clients of OpenAI's responses send, as messages."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.apis.reading import refuse
from rollout.gateway.calls import ClientCall, ClientMessage, are_of_one_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROLES = ("system", "developer", "user", "assistant")
#: Begin the ids of items; an answer's own id follows.
MESSAGE_ID, REASONING_ID, CALL_ID = "msg_", "rs_", "fc_"
#: Of tools that servers run: what they found is not in the conversation.
SERVER_ITEMS = ("web_search_call", "file_search_call", "image_generation_call", "tool_search_call")
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text")


class Part(msgspec.Struct):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None


class Item(msgspec.Struct):
    """What may stand in `input`."""

    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    output: str | list[Part] | None = None


def seal_reasoning(answer_id: str, reasoning: str) -> str:
    """Reasoning in the form that clients give back unread."""
    return f"{answer_id}.{base64.b64encode(reasoning.encode(errors='replace')).decode()}"


def unseal_reasoning(sealed: str) -> tuple[str, str | None]:
    """The answer's id and the reasoning; None where nothing of ours is in it."""
    answer_id, _, text = sealed.rpartition(".")
    try:
        return answer_id, base64.b64decode(text, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return sealed, None


class _Turn:
    """A turn of the model, of the items that stand together."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.reasoning: str | None = None
        self.calls: list[ClientCall] = []
        self.ids: list[str] = []

    @property
    def has_content(self) -> bool:
        return bool(self.text is not None or self.calls or self.reasoning is not None)

    def make_message(self) -> ClientMessage:
        return ClientMessage(
            role="assistant",
            text=self.text or "",
            reasoning=self.reasoning,
            calls=tuple(self.calls),
            ids=tuple(dict.fromkeys(self.ids)),
        )


def read_items(
    items: Sequence[Item], flatten_name: Callable[[str, str | None], str]
) -> tuple[ClientMessage, ...]:
    """The conversation that items are; those of one turn of the model become one message.

    Args:
        items: In order.
        flatten_name: The name of a tool for the model, of its own and its namespace's.
    """
    reader = _Reader(flatten_name)
    for index, item in enumerate(items):
        reader.read(item, f"input[{index}]")
    reader.end_turn()
    return tuple(reader.messages)


class _Reader:
    """Makes messages of items."""

    def __init__(self, flatten_name: Callable[[str, str | None], str]) -> None:
        self._flatten_name = flatten_name
        self._names: dict[str, str] = {}
        self._turn: _Turn | None = None
        self.messages: list[ClientMessage] = []

    def read(self, item: Item, path: str) -> None:
        if item.type == "message":
            self._read_message(item, path)
        elif item.type == "reasoning":
            self._read_reasoning(item)
        elif item.type in ("function_call", "custom_tool_call"):
            self._read_call(item, path)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            self.end_turn()
            content = _read_content(item.output, f"{path}.output")
            self.messages.append(
                ClientMessage(
                    role="tool",
                    text=content.text,
                    parts=content.parts,
                    call_id=item.call_id,
                    name=self._names.get(item.call_id),
                )
            )
        elif item.type not in SERVER_ITEMS:
            known = "message, reasoning, function_call, function_call_output, custom_tool_call"
            refuse(f"{path}.type", f"{item.type!r}; expected one of {known}")

    def end_turn(self) -> None:
        """What follows belongs to no turn before it."""
        if self._turn is not None:
            self.messages.append(self._turn.make_message())
            self._turn = None

    def _begin_turn(self) -> _Turn:
        self._turn = self._turn or _Turn()
        return self._turn

    def _read_message(self, item: Item, path: str) -> None:
        if item.role not in ROLES:
            refuse(f"{path}.role", f"{item.role!r}; expected one of {', '.join(ROLES)}")
        text, parts = _read_content(item.content, f"{path}.content")
        if parts and item.role != "user":
            refuse(f"{path}.content", "images may stand in messages of users and tools only")
        if item.role != "assistant":
            self.end_turn()
            self.messages.append(ClientMessage(role=item.role, text=text, parts=parts))
            return
        if self._turn is not None and self._turn.text is not None:
            self.end_turn()
        turn = self._begin_turn()
        turn.text = text
        if item.id:
            turn.ids.append(item.id.removeprefix(MESSAGE_ID))

    def _read_reasoning(self, item: Item) -> None:
        answer_id, reasoning = unseal_reasoning(item.encrypted_content or "")
        ids = [each for each in ((item.id or "").removeprefix(REASONING_ID), answer_id) if each]
        turn = self._turn
        # Some clients put it behind the text of its turn.
        if turn is not None and turn.has_content and not any(each in turn.ids for each in ids):
            self.end_turn()
        turn = self._begin_turn()
        turn.ids += ids
        parts = item.content if isinstance(item.content, list) and item.content else item.summary
        if parts:
            reasoning = "\n".join(part.text or "" for part in parts)
        if reasoning is not None:
            before = [] if turn.reasoning is None else [turn.reasoning]
            turn.reasoning = "\n".join([*before, reasoning])

    def _read_call(self, item: Item, path: str) -> None:
        name = self._flatten_name(item.name, item.namespace)
        arguments: object = {"input": item.input}
        if item.type == "function_call":
            arguments = reading.read_arguments(item.arguments, f"{path}.arguments")
        self._names[item.call_id] = name
        call = ClientCall(name, arguments, item.call_id)
        at = self._find_turn(call)
        if at is None:
            self._begin_turn().calls.append(call)
        else:
            turn = self.messages[at]
            self.messages[at] = msgspec.structs.replace(turn, calls=(*turn.calls, call))

    def _find_turn(self, call: ClientCall) -> int | None:
        """Where the turn is whose further call this is: some clients put results between them."""
        at = len(self.messages) - 1
        while at >= 0 and self.messages[at].role == "tool":
            at -= 1
        if self._turn is not None or at < 0 or not self.messages[at].calls:
            return None
        return at if are_of_one_answer(call.id, self.messages[at].calls[-1].id) else None


def _read_content(content: str | list[Part] | None, field: str) -> reading.Content:
    if content is None or isinstance(content, str):
        return reading.Content(content or "")
    parts: list[str | Mapping[str, Any]] = []
    for index, part in enumerate(content):
        if part.type in _TEXTS:
            parts.append(part.text or part.refusal or "")
        else:
            parts.append(reading.make_media_part(part.type, part.image_url, f"{field}[{index}]"))
    return reading.join_parts(parts)
