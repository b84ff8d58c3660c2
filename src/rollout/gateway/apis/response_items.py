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
    reading.check_values(*(item.arguments.encode() for item in items))
    reader = _Reader()
    for index, item in enumerate(items):
        reader.read(item, f"input[{index}]")
    return tuple(each.build() if isinstance(each, _Turn) else each for each in reader.messages)


class _Turn(msgspec.Struct):
    """A turn of the model while its items are read."""

    text: str = ""
    thoughts: list[str] = []
    calls: list[ClientCall] = []
    ids: dict[str, None] = {}  # each once, in order

    def build(self) -> ClientMessage:
        return ClientMessage(
            role="assistant",
            text=self.text,
            reasoning="\n".join(self.thoughts) if self.thoughts else None,
            calls=tuple(self.calls),
            ids=tuple(self.ids),
        )


class _Reader:
    """Makes messages of items."""

    def __init__(self) -> None:
        self.messages: list[ClientMessage | _Turn] = []
        self._names: dict[str, str] = {}
        #: The last message where it is a turn, to which the next item may belong.
        self._open: _Turn | None = None
        #: The same, also where results of its calls followed.
        self._last: _Turn | None = None

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
        self._open, self._last = None, self._last if role == "tool" else None

    def _begin_turn(self) -> _Turn:
        self._open = self._last = turn = _Turn()
        self.messages.append(turn)
        return turn

    def _read_message(self, item: Item, path: str) -> None:
        if item.role is None:
            refuse(f"{path}.role", "expected one of system, developer, user, assistant")
        if item.role != "assistant":
            self._append(item.role, item.content, f"{path}.content")
            return
        text = reading.make_message(item.role, item.content, f"{path}.content").text
        turn = self._open
        if turn is None or turn.text:
            turn = self._begin_turn()
        turn.text = text
        if item.id:
            turn.ids[item.id.removeprefix(MESSAGE_ID)] = None

    def _read_reasoning(self, item: Item) -> None:
        answer_id, reasoning = unseal_reasoning(item.encrypted_content or "")
        own = tuple(filter(None, ((item.id or "").removeprefix(REASONING_ID), answer_id)))
        turn = self._open or self._begin_turn()
        # Some clients put it behind the text of its turn.
        if (turn.text or turn.calls or turn.thoughts) and turn.ids.keys().isdisjoint(own):
            turn = self._begin_turn()
        parts = item.content if isinstance(item.content, list) and item.content else item.summary
        if parts:
            reasoning = "\n".join(part.text or "" for part in parts)
        if reasoning is not None:
            turn.thoughts.append(reasoning)
        turn.ids.update(dict.fromkeys(own))

    def _read_call(self, item: Item, path: str) -> None:
        name = flatten_name(item.name, item.namespace)
        arguments: object = {"input": item.input}
        if item.type == "function_call":
            arguments = reading.read_arguments(item.arguments, f"{path}.arguments")
        self._names[item.call_id] = name
        turn = self._last
        # Some clients put results between the calls of a turn.
        if turn is None or not turn.calls or not are_of_one_answer(item.call_id, turn.calls[-1].id):
            turn = self._open or self._begin_turn()
        turn.calls.append(ClientCall(name, arguments, item.call_id))
