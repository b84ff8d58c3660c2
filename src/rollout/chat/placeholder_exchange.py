"""The placeholder exchange after which new messages are rendered."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Literal

from rollout.chat.messages import template_call
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.chat.messages import TemplateMessage

#: Letters only, so that templates which trim or JSON-encode contents leave them recognisable.
USER_MARKER = "rolloutUserMarker"
ASSISTANT_MARKER = "rolloutAnswerMarker"

#: What the placeholder assistant says: text; text and calls, since some templates refuse results
#: without a call; or calls alone, since some write the text after the results (Gemma 4).
Answer = Literal["words", "words and calls", "calls"]


def conversation(
    messages: Sequence[TemplateMessage] = (), answer: Answer = "words"
) -> list[TemplateMessage]:
    """The exchange, then `messages`; where the assistant calls, it calls their tools."""
    said: TemplateMessage = {
        "role": "assistant",
        "content": "" if answer == "calls" else ASSISTANT_MARKER,
    }
    if answer != "words":
        results = itertools.takewhile(lambda message: message["role"] == "tool", messages)
        said["tool_calls"] = [
            template_call(result.get("tool_call_id", f"call_{at}"), result.get("name", "tool"), {})
            for at, result in enumerate(results)
        ]
    return [{"role": "user", "content": USER_MARKER}, said, *messages]


def with_contents(
    messages: Sequence[TemplateMessage], contents: Sequence[str]
) -> list[TemplateMessage]:
    return [
        {**message, "content": content} for message, content in zip(messages, contents, strict=True)
    ]


def after_answer(text: str) -> str:
    _, marker, after = text.partition(ASSISTANT_MARKER)
    if not marker:
        raise unusable("it leaves out the assistant's content")
    return after


def unusable(why: str) -> TemplateError:
    return TemplateError(f"the chat template cannot be used append-only: {why}")
