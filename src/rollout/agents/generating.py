"""Generates one turn of a conversation, from its start to its span in the transcript."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import msgspec

from rollout.agents.ending import Ending
from rollout.agents.prompt_sampling import warn_of_truncation
from rollout.agents.rendering import make_length_error
from rollout.engine.cores.checks import check_sampling
from rollout.engine.pool.generation import Generation
from rollout.errors import EngineError
from rollout.observe.events import TurnEnded, TurnStarted
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.agents.conversation import Conversation
    from rollout.agents.trajectory_state import TrajectoryState
    from rollout.agents.turn import AssistantTurn, TurnOptions
    from rollout.engine.core import FinishReason, SamplingParams
    from rollout.limits import Limit


async def generate_turn(conversation: Conversation, options: TurnOptions) -> AssistantTurn:
    """Have the engines continue a conversation; append what they sampled, and parse it.

    Whatever ends the wait, a limit, a failure or a cancellation, the tokens that have arrived are
    in the transcript. See `AgentContext.generate`.
    """
    state, log, stop = conversation._state, conversation._log, options.stop
    services, events, who = state.services, state.services.events, conversation._identity
    readers = (*conversation.on_tokens, *(() if stop is None else (stop,)))
    generation = Generation(readers, is_seeded=options.seed is not None)
    number, seed = conversation._assistant_turns, options.seed
    if seed is None:
        seed = who.seed_of_turn(number)
    conversation._generation = generation
    state.generations += 1  # now, since several conversations may generate at once
    try:
        await conversation._settle()
        started = state.clock()
        if events.tells_all:
            at = events.since_start(started)
            events.emit(TurnStarted(at=at, trajectory=who.number, turn=number, path=who.path))
        conversation._turn_began = state.limit.own_time()
        limit = _open_limit(conversation)
        recalled_s, is_over = None, False
        try:
            with limit, nullcontext() if stop is None else stop.scope:
                if conversation.history != "append_only" and log.is_renderable:
                    await conversation._render_again()
                prefix = log.transcript.prefix
                sampling = _draw_sampling(conversation, options, generation, seed)
                if state.log is not None and state.log.has_answers:
                    recalled_s = await state.log.recall_turn(prefix, seed, generation)
                if recalled_s is None:
                    await services.engines.generate(
                        generation,
                        session_id=conversation.session_id,
                        prompt_ids=prefix,
                        sampling=sampling,
                        priority=state.prompt.priority,
                        known_experts=log.transcript.routed_length,
                        group_id=conversation._group_id,
                        limit=limit,
                        trajectory=who.number,
                        media=log.transcript.media,
                    )
                is_stopped = stop is not None and stop.kept is not None
                if generation.finish_reason == "abort" and not is_stopped:
                    if limit.is_over:
                        raise limit.deadline.error()  # the engine kept it before we could
                    what = f"{conversation.session_id}: the engine aborted the generation"
                    raise EngineError(what)
            is_over = True
        finally:
            now = state.idle_since = state.clock()
            generation.kept = None if stop is None else stop.kept
            if services.media.placeholders:
                _end_before_placeholder(state, generation)
            waited_s = now - started - generation.held_s + (recalled_s or 0.0)
            state.count_generation(generation, waited_s)
            end = find_end(generation, limit, now)
            if events.is_on:
                _emit_turn_ended(conversation, generation, (started, now), end)
            is_noted = False
            if is_over and recalled_s is None and state.log is not None:
                turn_id = (conversation.session_id, number)
                is_noted = state.log.note_turn(prefix, seed, turn_id, generation, now - started)
            if generation.count or generation.finish_reason:
                finish_reason, conversation._cut_by = end
                log.append_generated(generation.kept_part(), finish_reason, seed)
                state.count_tokens(generation, conversation._known_tokens)
                conversation._known_tokens = log.transcript.prefix.length
                conversation._assistant_turns += 1
                if not is_over:
                    with suppress(Exception):  # a parser must not hide what ended the wait
                        conversation._end_turn()
        turn = log.end_turn(conversation._renderer.reader, conversation._cut_by)
        if is_noted and state.log is not None:
            await state.log.wait_written()
        if conversation._renderer.reader.schemas:  # tools could be called
            services.tally.turns_with_tools += 1
            services.tally.turns_with_calls += bool(turn.calls)
        return turn
    finally:
        conversation._generation = None
        state.generations -= conversation._assistant_turns == number  # no token came


def _open_limit(conversation: Conversation) -> Limit:
    """The limit of a generation that begins: its own, or the turn's where that is not longer."""
    state, limits = conversation._state, conversation._state.services.config.limits
    turn_s, generation_s = limits.turn_s, limits.generation_s
    if generation_s is None or (turn_s is not None and turn_s <= generation_s):
        return state.limit.open(turn_s, "limits.turn_s")
    return state.limit.open(generation_s, "limits.generation_s")


def _draw_sampling(
    conversation: Conversation, options: TurnOptions, generation: Generation, seed: int
) -> SamplingParams:
    """The sampling of a turn in the engine's terms; its generation knows the length that bounds it.

    Raises:
        LimitExceeded: Not one token fits.
        EngineError: The options have what no sampling has.
    """
    state, sampling = conversation._state, options.sampling or conversation._sampling
    if options.sampling is not None:
        check_sampling(sampling)
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
    if options.seed is not None:
        check_sampling(drawn)
    is_bent = drawn.temperature and (drawn.top_k, drawn.top_p, drawn.min_p) != (-1, 1.0, 0.0)
    if is_bent and conversation._trainable is not False and not state.identity.validate:
        generation.is_truncated = True
        warn_of_truncation(drawn, state.services, state.prompt, conversation._identity)
    return drawn


def _end_before_placeholder(state: TrajectoryState, generation: Generation) -> None:
    """Keep of a generation what comes before the first placeholder that it sampled."""
    before = state.services.media.find_placeholder(generation)
    if before is not None and (generation.kept is None or before < generation.kept):
        state.sampled_placeholders += 1
        generation.kept = before


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


def _emit_turn_ended(
    conversation: Conversation,
    generation: Generation,
    times: tuple[float, float],
    end: tuple[str, str | None],
) -> None:
    identity, count = conversation._identity, generation.count
    events = conversation._state.services.events
    is_begun = count > 0 or generation.finish_reason is not None
    event = TurnEnded(
        at=events.since_start(times[1]),
        trajectory=identity.number,
        turn=conversation.assistant_turns,
        began=events.since_start(times[0]),
        path=identity.path,
        requests=tuple([part.request_id for part in generation.parts]),
        prompt_tokens=len(conversation.transcript),
        cached_tokens=generation.cached_tokens,
        generated_tokens=count,
        held_s=generation.held_s,
        finish_reason=end[0] if is_begun else "",
        cut_by=end[1] or "",
    )
    events.tell_event(identity.number, event)
