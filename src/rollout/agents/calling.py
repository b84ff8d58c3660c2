"""Has tools answer the calls of a conversation's turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.agents.turn_log import make_calls_question
from rollout.tools import ToolResult
from rollout.tools.results import Answers
from rollout.tools.trajectory_tools import CallEvents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.agents.conversation import Conversation
    from rollout.types import InvalidToolCall, ToolCall

    Calls = Sequence[ToolCall | InvalidToolCall]


async def answer_calls(conversation: Conversation, calls: Calls) -> list[ToolResult]:
    """Run calls side by side, or take what a log remembers of them; count what they answer."""
    state = conversation._state
    state.count_calls(len(calls))
    results = await _find_results(conversation, calls)
    state.check_sandbox()
    state.tool_rewards += [r.reward for r in results if r.reward is not None]
    errors = state.count_errors(results, conversation._errors_in_a_row)
    conversation._errors_in_a_row = errors
    return results


async def _find_results(conversation: Conversation, calls: Calls) -> list[ToolResult]:
    state, log, session = conversation._state, conversation._state.log, conversation.session_id
    offered = None  # all tools of the trajectory
    if conversation._renderer is not state.renderer:
        schemas = conversation._renderer.reader.schemas
        offered = {str(schema["function"]["name"]) for schema in schemas}
    prefix = conversation.transcript.prefix
    question = None if log is None else make_calls_question(prefix, calls)
    if log is not None and question is not None and log.has_answers:
        known = await log.recall_answers(question, session, calls)
        if known is not None:
            return state.tools.recall(calls, known, offered)
    tools, events, turns = state.tools, None, conversation.assistant_turns
    if state.services.events.is_on:
        identity = conversation._identity
        where = {"trajectory": identity.number, "turn": turns - 1, "path": identity.path}
        events = CallEvents(state.services.events, where)
    before = tools.seconds
    results = await tools.run(calls, limit=conversation._turn, offered=offered, events=events)
    if any(result.has_media for result in results):
        results = await _read_media(conversation, calls, results)
    if log is not None and question is not None:
        answers = Answers(results, tools.seconds - before)
        if log.note_answers(question, (session, turns), answers, tools.find_stateful(calls)):
            await log.wait_written()
    return results


async def _read_media(
    conversation: Conversation, calls: Calls, results: list[ToolResult]
) -> list[ToolResult]:
    """Read the images and videos in results, within the turn's time."""
    state, read = conversation._state, list[ToolResult]()
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
