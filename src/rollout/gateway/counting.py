"""How many tokens a call would have the model read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.agents.long_texts import is_long, room_beside
from rollout.errors import TemplateError
from rollout.gateway.calls import refused_messages
from rollout.gateway.wording import accepted, conversation, is_plain, observation

if TYPE_CHECKING:
    from rollout.agents import AgentContext
    from rollout.gateway.request import Request


async def count_tokens(context: AgentContext, request: Request) -> int:
    """Those of the transcript that it continues and of what follows there; else of all rendered.

    Raises:
        GatewayError: The template refuses the messages.
    """
    try:
        return await _continued(context, request)
    except TemplateError:
        return await _rendered(context, request)


async def _continued(context: AgentContext, request: Request) -> int:
    turn, rest = request.found.said.turn, request.rest
    if turn is None or not rest or any(message.role == "assistant" for message, _ in rest):
        raise TemplateError("it continues nothing")
    template, texts = context.services.template, context.services.texts
    messages: Any = observation(rest, turn)
    transcript = turn.conversation.transcript
    last = transcript.prefix.slice(max(0, turn.stop - 64), turn.stop)
    before = [each.medium for each in transcript.media if each.start < turn.stop]
    messages = await context.services.media.prepared(messages, len(before))

    def count() -> int:
        return len(template.observation_ids(messages, after=last, before=before))

    return turn.stop + await texts.run(is_long(messages), count)


async def _rendered(context: AgentContext, request: Request) -> int:
    services, tools = context.services, request.call.tools
    messages: Any = conversation(request.messages)
    try:
        messages = await services.media.prepared(messages)
        if not is_plain(messages):
            messages = accepted(messages, services.template, tools)

        def count() -> int:
            return len(services.template.prompt_ids(messages, tools or None))

        return await services.texts.run(is_long(messages, room_beside(tools)), count)
    except TemplateError as error:
        raise refused_messages(request.call, error) from error
