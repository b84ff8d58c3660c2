"""LangChain's messages, as the gateway matches them, and answers as LangChain's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
)

from rollout.gateway.apis.reading import make_media_part
from rollout.gateway.calls import ClientCall, ClientMessage
from rollout.types import ToolCall as OwnCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.gateway.calls import Answer, Completion

#: Where reasoning stands in a message, as LangChain's own models have it.
REASONING = "reasoning_content"


def given_messages(messages: Sequence[BaseMessage]) -> tuple[ClientMessage, ...]:
    """The messages of a call."""
    return tuple(map(_given, messages))


def message_of(answer: Answer, completion: Completion) -> AIMessage:
    """What the model said; its ids are in ``response_metadata["token_ids"]``."""
    calls = [
        ToolCall(name=each.name, args=dict(each.arguments), id=each.id, type="tool_call")
        for each in answer.calls
        if isinstance(each, OwnCall)
    ]
    invalid = [
        InvalidToolCall(
            name=None, args=each.raw, id=None, error=each.reason, type="invalid_tool_call"
        )
        for each in answer.calls
        if not isinstance(each, OwnCall)
    ]
    prompt, said = len(completion.prompt_ids), len(answer.ids)
    return AIMessage(
        content=answer.client_text,
        id=answer.id,
        tool_calls=calls,
        invalid_tool_calls=invalid,
        additional_kwargs={} if answer.reasoning is None else {REASONING: answer.reasoning},
        response_metadata={"finish_reason": answer.finish, "token_ids": answer.ids.tolist()},
        usage_metadata={
            "input_tokens": prompt,
            "output_tokens": said,
            "total_tokens": prompt + said,
            "input_token_details": {"cache_read": completion.cached_tokens},
        },
    )


def _given(message: BaseMessage) -> ClientMessage:
    text = message.text if isinstance(message.text, str) else str(message.text)
    if isinstance(message, AIMessage):
        return ClientMessage(
            role="assistant",
            text=text,
            reasoning=_reasoning(message),
            calls=tuple(
                ClientCall(call["name"], call["args"], call["id"] or "")
                for call in message.tool_calls
            ),
            ids=() if message.id is None else (message.id,),
        )
    parts = _shown(message.content)
    if isinstance(message, ToolMessage):
        return ClientMessage(
            role="tool",
            text=text,
            parts=parts,
            call_id=message.tool_call_id,
            name=message.name,
        )
    return ClientMessage(role=_role(message), text=text, name=message.name, parts=parts)


def _shown(content: Any) -> tuple[str | Mapping[str, Any], ...]:
    """Texts and images of a content in their order; empty where there are no images."""
    blocks = content if isinstance(content, list) else []
    is_shown = [isinstance(b, dict) and b.get("type") not in ("text", None) for b in blocks]
    if not any(is_shown):
        return ()
    return tuple(
        _image(block) if shown else block if isinstance(block, str) else str(block.get("text", ""))
        for block, shown in zip(blocks, is_shown, strict=True)
    )


def _image(block: Mapping[str, Any]) -> Mapping[str, Any]:
    kind, value = str(block["type"]), block.get(str(block["type"]), block.get("url"))
    if isinstance(block.get("base64"), str):
        value = {"type": "base64", "media_type": block.get("mime_type"), "data": block["base64"]}
    return make_media_part(kind, value, f"a block of type {kind!r}")


def _role(message: BaseMessage) -> str:
    if isinstance(message, SystemMessage):
        return str(message.additional_kwargs.get("__openai_role__", "system"))
    if isinstance(message, ChatMessage):
        return message.role
    return "tool" if isinstance(message, FunctionMessage) else "user"


def _reasoning(message: AIMessage) -> str | None:
    """As it was told, or in blocks of the content as LangChain's standard has them."""
    kept: Any = message.additional_kwargs.get(REASONING)
    if isinstance(kept, str):
        return kept
    if isinstance(message.content, str):
        return None
    blocks = [b for b in message.content if isinstance(b, dict) and b.get("type") == "reasoning"]
    return "".join(str(block.get("reasoning", "")) for block in blocks) if blocks else None
