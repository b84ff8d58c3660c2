"""The items that clients of OpenAI's responses send, as messages."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rollout.gateway.apis import reading
from rollout.gateway.apis.reading import refuse
from rollout.gateway.calls import ClientCall, ClientMessage, are_of_one_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Begin the ids of items; an answer's own id follows.
MESSAGE_ID, REASONING_ID, CALL_ID = "msg_", "rs_", "fc_"
#: Of tools that servers run: what they found is not in the conversation.
SERVER_ITEMS = ("web_search_call", "file_search_call", "image_generation_call", "tool_search_call")


class Item(msgspec.Struct):
    """What may stand in `input`."""

    type: str = "message"
    role: Annotated[str, reading.match_one("system", "developer", "user", "assistant")] | None = (
        None
    )
    content: str | list[reading.Part] | None = None
    summary: list[reading.Part] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    output: str | list[reading.Part] | None = None


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


def flatten_name(name: str, space: str | None) -> str:
    """The name of a tool for the model, of its own and its namespace's."""
    return f"{space.rstrip('_')}__{name}" if space else name


def read_items(items: Sequence[Item]) -> tuple[ClientMessage, ...]:
    """The conversation that items are; those of one turn of the model become one message."""
    reader = _Reader()
    for index, item in enumerate(items):
        reader.read(item, f"input[{index}]")
    return tuple(reader.messages)


class _Reader:
    """Makes messages of items."""

    def __init__(self) -> None:
        self.messages: list[ClientMessage] = []
        self._names: dict[str, str] = {}
        #: Whether the last message is a turn of the model to which the next item may belong.
        self._is_open = False

    def read(self, item: Item, path: str) -> None:
        if item.type == "message":
            self._read_message(item, path)
        elif item.type == "reasoning":
            self._read_reasoning(item)
        elif item.type in ("function_call", "custom_tool_call"):
            self._read_call(item, path)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            name = self._names.get(item.call_id)
            self._append("tool", item.output, f"{path}.output", call_id=item.call_id, name=name)
        elif item.type not in SERVER_ITEMS:
            known = "message, reasoning, function_call, function_call_output, custom_tool_call"
            refuse(f"{path}.type", f"{item.type!r}; expected one of {known}")

    def _append(self, role: str, content: Any, field: str, **more: Any) -> None:
        self.messages.append(reading.make_message(role, content, field, **more))
        self._is_open = False

    def _open_turn(self, *, is_new: bool = False) -> ClientMessage:
        """The turn that items extend, the last message."""
        if is_new or not self._is_open:
            self.messages.append(ClientMessage(role="assistant"))
            self._is_open = True
        return self.messages[-1]

    def _extend(self, at: int = -1, **fields: Any) -> None:
        self.messages[at] = msgspec.structs.replace(self.messages[at], **fields)

    def _read_message(self, item: Item, path: str) -> None:
        if item.role is None:
            refuse(f"{path}.role", "expected one of system, developer, user, assistant")
        if item.role != "assistant":
            self._append(item.role, item.content, f"{path}.content")
            return
        text = reading.make_message(item.role, item.content, f"{path}.content").text
        turn = self._open_turn(is_new=self._is_open and bool(self.messages[-1].text))
        own = (item.id.removeprefix(MESSAGE_ID),) if item.id else ()
        self._extend(text=text, ids=tuple(dict.fromkeys(turn.ids + own)))

    def _read_reasoning(self, item: Item) -> None:
        answer_id, reasoning = unseal_reasoning(item.encrypted_content or "")
        own = tuple(filter(None, ((item.id or "").removeprefix(REASONING_ID), answer_id)))
        turn = self._open_turn()
        # Some clients put it behind the text of its turn.
        has_content = turn.text or turn.calls or turn.reasoning is not None
        if has_content and not set(own) & set(turn.ids):
            turn = self._open_turn(is_new=True)
        parts = item.content if isinstance(item.content, list) and item.content else item.summary
        if parts:
            reasoning = "\n".join(part.text or "" for part in parts)
        if reasoning is None:
            reasoning = turn.reasoning
        elif turn.reasoning is not None:
            reasoning = f"{turn.reasoning}\n{reasoning}"
        self._extend(reasoning=reasoning, ids=tuple(dict.fromkeys(turn.ids + own)))

    def _read_call(self, item: Item, path: str) -> None:
        name = flatten_name(item.name, item.namespace)
        arguments: object = {"input": item.input}
        if item.type == "function_call":
            arguments = reading.read_arguments(item.arguments, f"{path}.arguments")
        self._names[item.call_id] = name
        call = ClientCall(name, arguments, item.call_id)
        at = self._find_turn(call)
        if at is None:
            self._open_turn()
            at = len(self.messages) - 1
        self._extend(at, calls=(*self.messages[at].calls, call))

    def _find_turn(self, call: ClientCall) -> int | None:
        """Where the turn is whose further call this is: some clients put results between them."""
        at = len(self.messages) - 1
        while at >= 0 and self.messages[at].role == "tool":
            at -= 1
        if self._is_open or at < 0 or not self.messages[at].calls:
            return None
        return at if are_of_one_answer(call.id, self.messages[at].calls[-1].id) else None
