"""A prompt's messages as clients of OpenAI's API send them."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from rollout.agents.ending import RejectedPrompt
from rollout.chat.messages import as_messages, template_messages, with_arguments_as_text
from rollout.chat.result_order import order_messages
from rollout.errors import MediaError, TemplateError
from rollout.media import Media
from rollout.medium import FRAMES_MIME

if TYPE_CHECKING:
    from rollout.agents.context import AgentContext


async def openai_messages(context: AgentContext) -> list[dict[str, Any]]:
    """Those of the trajectory's prompt; images and videos in them as data URLs.

    Raises:
        RejectedPrompt: They are malformed, or a medium in them cannot be taken.
    """
    media = context.services.media
    try:
        given = await media.prepared(context.prompt.messages, is_shared=True)
        messages = with_arguments_as_text(template_messages(order_messages(as_messages(given))))
        return [
            {**each, "content": await media.run(_content, each["content"])}
            if isinstance(each["content"], list)
            else each
            for each in messages
        ]
    except TemplateError as error:
        raise RejectedPrompt("bad_message", str(error)) from error


def _content(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_part(part) for part in parts]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    medium = part.get(part["type"])
    if not isinstance(medium, Media):
        return part
    if medium.mime == FRAMES_MIME:
        raise MediaError("frames have no form in OpenAI's API: give a video file")
    url = f"data:{medium.mime};base64,{base64.b64encode(medium.content).decode()}"
    kind = f"{medium.kind}_url"
    return {"type": kind, kind: {"url": url}}
