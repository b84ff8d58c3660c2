"""Has tools answer the calls of a conversation's turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.agents.turn_log import make_calls_question
from rollout.tools import ToolResult
from rollout.tools.results import Answers
from rollout.tools.trajectory_tools import CallEvents

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rollout.agents.conversation import Conversation
    from rollout.types import InvalidToolCall, ToolCall

    Calls = Sequence[ToolCall | InvalidToolCall]


async def answer_calls(conversation: Conversation, calls: Calls) -> list[ToolResult]:
    """Run calls side by side, or take what a log remembers of them; count what they answer."""
    state, log, session = conversation._state, conversation._state.log, conversation.session_id
    state.count_calls(len(calls))
    offered = None  # all tools of the trajectory
    if conversation._renderer is not state.renderer:
        schemas = conversation._renderer.reader.schemas
        offered = {str(schema["function"]["name"]) for schema in schemas}
    known = None
    if log is not None:
        question = make_calls_question(conversation.transcript.prefix, calls)
        known = await log.recall_answers(question, session, calls) if log.has_answers else None
    if known is not None:
        results = state.tools.recall(calls, known, offered)
    else:
        before = state.tools.seconds
        results = await _run(conversation, calls, offered)
        if log is not None:
            answers = Answers(results, state.tools.seconds - before)
            turn, stateful = conversation.assistant_turns, state.tools.find_stateful(calls)
            if log.note_answers(question, (session, turn), answers, stateful):
                await log.wait_written()
    state.check_sandbox()
    state.tool_rewards += [r.reward for r in results if r.reward is not None]
    errors = state.count_errors(results, conversation._errors_in_a_row)
    conversation._errors_in_a_row = errors
    return results


async def _run(
    conversation: Conversation, calls: Calls, offered: Collection[str] | None
) -> list[ToolResult]:
    """Run calls; read the images and videos in their results, within the turn's time."""
    state, events = conversation._state, None
    if state.services.events.is_on:
        identity, turn = conversation._identity, conversation.assistant_turns - 1
        where = {"trajectory": identity.number, "turn": turn, "path": identity.path}
        events = CallEvents(state.services.events, where)
    limit = conversation._open_turn_limit()
    results = await state.tools.run(calls, limit=limit, offered=offered, events=events)
    if not any(result.has_media for result in results):
        return results
    read = list[ToolResult]()
    count = len(conversation.transcript.media)
    with conversation.answering():
        for call, result in zip(calls, results, strict=True):
            name = getattr(call, "name", "tool")
            shown = await state.services.media.seen(name, result, count)
            if shown.is_error and not result.is_error:
                state.tools.note_refused_media(name)
            count += len(shown.images) + len(shown.videos)
            read.append(shown)
    return read
