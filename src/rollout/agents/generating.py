"""One turn of a conversation: generated from its start to its span, and answered by tools."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.agents.ending import Ending
from rollout.agents.prompt_sampling import read_sampling, warn_of_truncation
from rollout.agents.rendering import NO_ROOM_AGAIN, make_length_error
from rollout.agents.turn import StopStrings
from rollout.agents.turn_log import make_calls_question
from rollout.containment import UnresponsiveError
from rollout.engine.pool.generation import Generation
from rollout.errors import AgentError, EngineError, LimitExceeded
from rollout.observe.events import TurnEnded, TurnStarted
from rollout.tools import ToolResult
from rollout.tools.calls import CallEvents
from rollout.tools.results import Answers
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rollout.agents.conversation import Conversation
    from rollout.agents.turn import AssistantTurn
    from rollout.engine.core import FinishReason, SamplingParams
    from rollout.limits import Limit
    from rollout.types import InvalidToolCall, ToolCall

    Calls = Sequence[ToolCall | InvalidToolCall]

_NO_SCOPE = nullcontext()


async def generate_turn(
    conversation: Conversation,
    sampling: Mapping[str, Any] | SamplingParams | None = None,
    stop: StopStrings | None = None,
) -> AssistantTurn:
    """Have the engines continue a conversation; append what they sampled, and parse it.

    Whatever ends the wait, a limit, a failure or a cancellation, the tokens that have arrived are
    in the transcript. See `AgentContext.generate`.

    Args:
        sampling: Of this turn; or fields that differ from the conversation's. A seed among these
            takes the place of that which derives from the conversation and the turn.
        stop: Ends it before the model does.
    """
    if not conversation.transcript:
        await conversation.begin()
    conversation._check_idle("generate")
    if not isinstance(stop, StopStrings | None):
        raise AgentError(f"generate: stop_strings = {stop!r:.80}; expected StopStrings")
    seed: int | None = None
    if sampling is None:
        sampling = conversation._sampling
    elif isinstance(sampling, Mapping):
        seed = sampling.get("seed")
        sampling = read_sampling("generate", sampling, conversation._state, conversation._sampling)
    conversation.check_turns()
    state, log, number = conversation._state, conversation._state.log, conversation._assistant_turns
    generation = conversation._generation = Generation(
        (*conversation.on_tokens, *(() if stop is None else (stop,))), is_seeded=seed is not None
    )
    if seed is None:
        seed = conversation._identity.seed_of_turn(number)
    state.generations += 1  # now, since several conversations may generate at once
    try:
        await conversation._settle()
        started = state.limit.now()
        _emit_turn_started(conversation, started)
        conversation._turn_began = state.limit.own_time()
        limit, is_noted = _open_limit(conversation), False
        try:
            with limit, _NO_SCOPE if stop is None else stop.scope:
                if conversation.history != "append_only":
                    await _render_again(conversation)
                sampling = _bound_sampling(conversation, sampling, generation, seed)
                prefix = conversation.transcript.prefix
                known_s = None if log is None else await log.recall_turn(prefix, seed, generation)
                if known_s is None:
                    _ask(conversation, generation, sampling, limit)
                    await state.services.engines.generate(generation)
                if generation.finish_reason == "abort" and generation.kept is None:
                    if limit.is_over:
                        raise limit.deadline.error()  # the engine kept it before we could
                    fault = "the engine aborted the generation"
                    raise EngineError(f"{conversation.session_id}: {fault}")
            state.check_open("generate")
            if known_s is not None:
                state.generation_s += known_s
            elif log is not None:
                place, took_s = (conversation.session_id, number), state.limit.now() - started
                is_noted = log.note_turn(prefix, seed, place, generation, took_s)
        except BaseException:
            if _append_sampled(conversation, generation, limit, started, seed):
                with suppress(Exception):  # a parser must not hide what ended the wait
                    conversation._end_turn()
            raise
        _append_sampled(conversation, generation, limit, started, seed)
        return await _read_turn(conversation, stop, is_noted=is_noted)
    except (LimitExceeded, UnresponsiveError) as error:
        conversation._note_limit(error)
        raise
    finally:
        conversation._generation = None
        state.generations -= conversation._assistant_turns == number  # no token came


async def _read_turn(
    conversation: Conversation, stop: StopStrings | None, *, is_noted: bool
) -> AssistantTurn:
    """Parse what was sampled, and count whether it calls tools."""
    state, reader = conversation._state, conversation._renderer.reader
    turn = conversation._history.end_turn(conversation._cut_by)
    if stop is not None and stop.found is not None:
        text, in_reasoning = stop.before(turn.text), conversation._history.in_reasoning
        turn = reader.read_text(text, None, in_reasoning=in_reasoning)
    if is_noted and state.log is not None:
        await state.log.wait_written()
    if reader.schemas:  # tools could be called
        state.services.tally.turns_with_tools += 1
        state.services.tally.turns_with_calls += bool(turn.calls)
    return turn


def _ask(
    conversation: Conversation, generation: Generation, sampling: SamplingParams, limit: Limit
) -> None:
    """Say what a generation is to continue."""
    transcript = conversation.transcript
    generation.ask(
        session_id=conversation.session_id,
        prompt_ids=transcript.prefix,
        sampling=sampling,
        priority=conversation._state.prompt.priority,
        known_experts=transcript.routed_length,
        group_id=conversation._group_id,
        limit=limit,
        trajectory=conversation._identity.number,
        media=transcript.media,
    )


def _append_sampled(
    conversation: Conversation, generation: Generation, limit: Limit, started: float, seed: int
) -> bool:
    """Append and count what of a generation has arrived; return whether anything has."""
    state = conversation._state
    now = state.idle_since = state.limit.now()
    media = state.services.media
    before = media.find_placeholder(generation) if media.placeholders else None
    if before is not None and (generation.kept is None or before < generation.kept):
        state.sampled_placeholders += 1
        generation.kept = before
    waited_s = now - started - generation.held_s
    state.count_generation(generation, waited_s, conversation._known_tokens)
    finish_reason, cut_by = find_end(generation, limit, now)
    has_ended = generation.finish_reason not in (None, "abort")
    has_begun = not state.is_over and bool(generation.count or has_ended)
    if state.services.events.is_on:
        end = finish_reason if has_begun else "", cut_by or ""
        _emit_turn_ended(conversation, generation, (started, now), end)
    if has_begun:
        conversation._cut_by = cut_by
        conversation._history.append_generated(generation.kept_part(), finish_reason, seed)
        conversation._known_tokens = conversation.transcript.prefix.length
        conversation._assistant_turns += 1
    return has_begun


async def _render_again(conversation: Conversation) -> None:
    """Open another row where the template writes the history otherwise than the row has it.

    Raises:
        LimitExceeded: The new row would leave no room for a token; the old one stays.
    """
    history = conversation._history
    if conversation.history != "inference_template":
        known = "expected 'append_only' or 'inference_template'"
        raise AgentError(f"context.history = {conversation.history!r:.80}; {known}")
    if history.turn_start is not None or history.has_raw_ids or not history.turns:
        return  # not all of it is in messages, or the model has not generated
    transcript = await conversation._renderer.render_again(history)
    room, source = conversation._find_room(transcript)
    if room < 1:
        raise make_length_error(source, NO_ROOM_AGAIN)
    if history.add_row(transcript):
        conversation._known_tokens = 0


def _open_limit(conversation: Conversation) -> Limit:
    """The limit of a generation that begins: its own, or the turn's where that is not longer."""
    state, limits = conversation._state, conversation._state.services.config.limits
    turn_s, generation_s = limits.turn_s, limits.generation_s
    if generation_s is None or (turn_s is not None and turn_s <= generation_s):
        return state.limit.open(turn_s, "limits.turn_s")
    return state.limit.open(generation_s, "limits.generation_s")


def _bound_sampling(
    conversation: Conversation, sampling: SamplingParams, generation: Generation, seed: int
) -> SamplingParams:
    """The sampling of a turn in the engine's terms; its generation knows the length that bounds it.

    Raises:
        LimitExceeded: Not one token fits.
    """
    state = conversation._state
    most, generation.bounded_by = conversation._find_room()
    if most < 1:
        raise make_length_error(generation.bounded_by, "there is no room for another token")
    turn_room = state.services.config.lengths.turn
    if turn_room is not None and turn_room < most:
        most, generation.bounded_by = turn_room, "lengths.turn"
    if sampling.max_new_tokens < most:
        most, generation.bounded_by = sampling.max_new_tokens, "sampling.max_new_tokens"
    stops = state.services.stop_token_ids
    if sampling.stop_token_ids:
        stops = tuple(sorted({*sampling.stop_token_ids, *stops}))
    drawn = msgspec.structs.replace(sampling, max_new_tokens=most, seed=seed, stop_token_ids=stops)
    is_bent = drawn.temperature and (drawn.top_k, drawn.top_p, drawn.min_p) != (-1, 1.0, 0.0)
    if is_bent and conversation._trainable is not False and not state.identity.validate:
        generation.is_truncated = True
        warn_of_truncation(drawn, state.services, state.prompt, conversation._identity)
    return drawn


def find_end(generation: Generation, limit: Limit, now: float) -> tuple[str, str | None]:
    """How a turn ends: the `finish_reason` of its span, and its `AssistantTurn.cut_by`.

    | the engine said | finish_reason | cut_by | a trajectory that returns then |
    | --- | --- | --- | --- |
    | stop | stop | None | completed |
    | length | length | the path of the length that bounded it | length |
    | abort, or nothing yet, past the deadline | deadline | the path of the deadline | its own |
    | abort, or nothing yet | abort | abort | its own |
    | error | error | error | its own |

    Args:
        limit: The generation's; an engine may keep it before the driver does.
        now: Clock time.
    """
    reason: FinishReason = generation.finish_reason or "abort"
    if generation.kept is not None or reason == "stop":
        return "stop", None
    if reason == "length":
        return "length", generation.bounded_by
    if reason == "abort" and now >= limit.ends_at:
        return "deadline", limit.deadline.source
    return reason, reason


def find_natural_ending(finish_reason: str | None, cut_by: str | None) -> Ending:
    """The ending of a trajectory whose agent returned after a turn that ended so.

    Args:
        finish_reason: Of the last generated span; None where there is none.
        cut_by: Of the last turn.
    """
    if cut_by is None or finish_reason != "length":  # another cut is the agent's own
        return Ending(outcome=Outcome.COMPLETED, reason="")
    reason = cut_by.rpartition(".")[2]
    return Ending(outcome=Outcome.LENGTH, reason=reason, limit_source=cut_by)


def _emit_turn_started(conversation: Conversation, started: float) -> None:
    identity, events = conversation._identity, conversation._state.services.events
    if events.tells_all:
        at, turn = events.since_start(started), conversation.assistant_turns
        event = TurnStarted(at=at, trajectory=identity.number, turn=turn, path=identity.path)
        events.emit(event)


def _emit_turn_ended(
    conversation: Conversation,
    generation: Generation,
    times: tuple[float, float],
    end: tuple[str, str],
) -> None:
    identity, events = conversation._identity, conversation._state.services.events
    event = TurnEnded(
        at=events.since_start(times[1]),
        trajectory=identity.number,
        turn=conversation.assistant_turns,
        began=events.since_start(times[0]),
        path=identity.path,
        requests=tuple([part.request_id for part in generation.parts]),
        prompt_tokens=len(conversation.transcript),
        cached_tokens=generation.cached_tokens,
        generated_tokens=generation.count,
        held_s=generation.held_s,
        finish_reason=end[0],
        cut_by=end[1],
    )
    events.tell_event(identity.number, event)


async def answer_calls(conversation: Conversation, calls: Calls) -> list[ToolResult]:
    """Run calls side by side, or take what the log remembers of them; count what they answer."""
    state, log, session = conversation._state, conversation._state.log, conversation.session_id
    state.count_calls(len(calls))
    offered = None  # all tools of the trajectory
    if conversation._renderer is not state.renderer:
        schemas = conversation._renderer.reader.schemas
        offered = {str(schema["function"]["name"]) for schema in schemas}
    known = None
    if log is not None:
        question = make_calls_question(conversation.transcript.prefix, calls)
        known = await log.recall_answers(question, session, calls)
    if known is not None:
        results = state.tools.recall(calls, known, offered)
    else:
        before = state.tools.seconds
        results = await _run_calls(conversation, calls, offered)
        if log is not None:
            answers = Answers(results, state.tools.seconds - before)
            turn, stateful = conversation.assistant_turns, state.tools.find_stateful(calls)
            if log.note_answers(question, (session, turn), answers, stateful):
                await log.wait_written()
    sandbox = state.used_sandbox
    if sandbox is not None and sandbox.failure is not None:
        raise type(sandbox.failure)(str(sandbox.failure)) from sandbox.failure
    state.tool_rewards += [r.reward for r in results if r.reward is not None]
    conversation._errors_in_a_row = state.count_errors(results, conversation._errors_in_a_row)
    return results


async def _run_calls(
    conversation: Conversation, calls: Calls, offered: Collection[str] | None
) -> list[ToolResult]:
    """Run calls; read the images and videos in their results, within the turn's time."""
    state, events = conversation._state, None
    if state.services.events.is_on:
        identity, turn = conversation._identity, conversation.assistant_turns - 1
        where = {"trajectory": identity.number, "turn": turn, "path": identity.path}
        events = CallEvents(state.services.events, where)
    limit = conversation.answering()
    results = await state.tools.run(calls, limit=limit, offered=offered, events=events)
    if not any(result.has_media for result in results):
        return results
    read, count = list[ToolResult](), len(conversation.transcript.media)
    with conversation.answering():
        for call, result in zip(calls, results, strict=True):
            name = getattr(call, "name", "tool")
            shown = await state.services.media.read_result(name, result, count)
            if shown.is_error and not result.is_error:
                state.tools.note_refused_media(name)
            count += len(shown.images) + len(shown.videos)
            read.append(shown)
    return read
