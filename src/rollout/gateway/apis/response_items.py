"""The items of OpenAI's responses: those that clients give, as messages."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.apis.reading import refuse
from rollout.gateway.calls import GivenCall, GivenMessage, are_of_one_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROLES = ("system", "developer", "user", "assistant")
#: Begin the ids of items; an answer's own id follows.
MESSAGE_ID, REASONING_ID, CALL_ID = "msg_", "rs_", "fc_"
#: Follows `REASONING_ID` where thoughts are told after the text of their turn.
#: Of tools that servers run: what they found is not in the conversation.
SERVER_ITEMS = ("web_search_call", "file_search_call", "image_generation_call", "tool_search_call")


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


def sealed(answer_id: str, reasoning: str) -> str:
    """Reasoning in the form that clients give back unread."""
    return f"{answer_id}.{base64.b64encode(reasoning.encode(errors='replace')).decode()}"


def unsealed(sealed_text: str) -> tuple[str, str | None]:
    """The answer's id and the reasoning; None where nothing of ours is in it."""
    answer_id, _, text = sealed_text.rpartition(".")
    try:
        return answer_id, base64.b64decode(text, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return sealed_text, None


class _Turn:
    """A turn of the model, of the items that stand together."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.reasoning: str | None = None
        self.calls: list[GivenCall] = []
        self.ids: list[str] = []

    def message(self) -> GivenMessage:
        return GivenMessage(
            role="assistant",
            text=self.text or "",
            reasoning=self.reasoning,
            calls=tuple(self.calls),
            ids=tuple(dict.fromkeys(self.ids)),
        )


class _Reader:
    """Makes messages of items."""

    def __init__(self, flat_name: Callable[[str, str | None], str]) -> None:
        self._flat_name = flat_name
        self._names: dict[str, str] = {}
        self._turn: _Turn | None = None
        self.messages: list[GivenMessage] = []

    def read(self, item: Item, place: str) -> None:
        if item.type == "message":
            self._message(item, place)
        elif item.type == "reasoning":
            self._reasoning(item, place)
        elif item.type in ("function_call", "custom_tool_call"):
            self._call(item, place)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            self.end_turn()
            said = _said(item.output, f"{place}.output")
            name = self._names.get(item.call_id)
            self.messages.append(
                GivenMessage(
                    role="tool", text=said.text, parts=said.parts, call_id=item.call_id, name=name
                )
            )
        elif item.type not in SERVER_ITEMS:
            known = "message, reasoning, function_call, function_call_output, custom_tool_call"
            refuse(f"{place}.type", f"{item.type!r}; expected one of {known}")

    def end_turn(self) -> None:
        """What follows belongs to no turn before it."""
        if self._turn is not None:
            self.messages.append(self._turn.message())
            self._turn = None

    def _open(self) -> _Turn:
        self._turn = self._turn or _Turn()
        return self._turn

    def _message(self, item: Item, place: str) -> None:
        if item.role not in ROLES:
            refuse(f"{place}.role", f"{item.role!r}; expected one of {', '.join(ROLES)}")
        said = _said(item.content, f"{place}.content")
        text = said.text
        if said.parts and item.role != "user":
            refuse(f"{place}.content", "images may stand in messages of users and tools only")
        if item.role != "assistant":
            self.end_turn()
            self.messages.append(GivenMessage(role=item.role, text=text, parts=said.parts))
            return
        if self._turn is not None and self._turn.text is not None:
            self.end_turn()
        turn = self._open()
        turn.text = text
        self._note(turn, item, MESSAGE_ID)

    def _reasoning(self, item: Item, place: str) -> None:
        answer_id, said = unsealed(item.encrypted_content or "")
        item_id = (item.id or "").removeprefix(REASONING_ID)
        turn = self._turn
        if turn is not None and (turn.text is not None or turn.calls or turn.reasoning is not None):
            is_late = any(each and each in turn.ids for each in (answer_id, item_id))
            if not is_late:
                self.end_turn()
        turn = self._open()
        turn.ids += [each for each in (item_id, answer_id) if each]
        parts = item.content if isinstance(item.content, list) and item.content else item.summary
        if parts:
            said = "\n".join(part.text or "" for part in parts)
        if said is not None:
            turn.reasoning = said if turn.reasoning is None else f"{turn.reasoning}\n{said}"

    def _call(self, item: Item, place: str) -> None:
        name = self._flat_name(item.name, item.namespace)
        if item.type == "custom_tool_call":
            arguments: object = {"input": item.input}
        else:
            text = item.arguments
            arguments = reading.arguments_of(text, f"{place}.arguments") if text else {}
        self._names[item.call_id] = name
        call = GivenCall(name, arguments, item.call_id)
        at = self._asked_with(call)
        if at is None:
            self._open().calls.append(call)
        else:
            turn = self.messages[at]
            self.messages[at] = msgspec.structs.replace(turn, calls=(*turn.calls, call))

    def _asked_with(self, call: GivenCall) -> int | None:
        """Where the turn is whose further call this is: some clients put answers between them."""
        at = len(self.messages) - 1
        while at >= 0 and self.messages[at].role == "tool":
            at -= 1
        if self._turn is not None or at < 0 or not self.messages[at].calls:
            return None
        return at if are_of_one_answer(call.id, self.messages[at].calls[-1].id) else None

    def _note(self, turn: _Turn, item: Item, prefix: str) -> None:
        if item.id:
            turn.ids.append(item.id.removeprefix(prefix))


def messages_of(
    items: Sequence[Item], flat_name: Callable[[str, str | None], str]
) -> tuple[GivenMessage, ...]:
    """The conversation that items are; those of one turn of the model become one message.

    Args:
        flat_name: The name of a tool for the model, of its own and its namespace's.

    Raises:
        GatewayError: An item cannot be read.
    """
    reader = _Reader(flat_name)
    for index, item in enumerate(items):
        reader.read(item, f"input[{index}]")
    reader.end_turn()
    return tuple(reader.messages)


_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text")


def _said(content: str | list[Part] | None, field: str) -> reading.Shown:
    if content is None or isinstance(content, str):
        return reading.Shown(content or "")
    parts: list[str | Mapping[str, Any]] = []
    for index, part in enumerate(content):
        if part.type in _TEXTS:
            parts.append(part.text or part.refusal or "")
        else:
            parts.append(reading.image_part(part.type, part.image_url, f"{field}[{index}]"))
    return reading.shown(parts)
