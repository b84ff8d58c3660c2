"""A generated turn as a client gets it, and as the index of turns knows it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.gateway.apis.reading import MAX_DEPTH, is_too_deep
from rollout.gateway.apis.writing import write_text_input
from rollout.gateway.calls import ID_LENGTH, Answer, ClientCall, ClientMessage, mint_call_id
from rollout.gateway.message_keys import hash_message
from rollout.gateway.turn_index import Turn
from rollout.types import InvalidToolCall, ToolCall

if TYPE_CHECKING:
    from rollout.agents import AgentContext, AssistantTurn
    from rollout.engine.pool.generation import Generation
    from rollout.gateway.calls import Finish, GatewayCall


def make_answer(
    turn: AssistantTurn,
    call: GatewayCall,
    generation: Generation,
    *,
    answer_id: str,
    stop_string: str | None,
) -> Answer:
    """The answer of a call.

    Args:
        turn: What the model generated, up to where a stop string begins.
        call: What its client asked for.
        generation: The turn's.
        answer_id: Of the answer.
        stop_string: What ended the turn, where one did.
    """
    calls, text, written = tuple(map(_limit_depth, turn.calls)), turn.content, turn.written
    if calls != turn.calls or not call.allows_calls:
        written = None
    if not call.allows_calls:
        text, calls = "\n".join(filter(None, [text, *(each.raw for each in calls)])), ()
    sent: list[ToolCall | InvalidToolCall] = []
    count = 0
    for each in calls:
        if isinstance(each, InvalidToolCall):
            sent.append(each)
        elif call.parallel_calls or not count:
            sent.append(msgspec.structs.replace(each, id=mint_call_id(answer_id, count)))
            count += 1
    finish: Finish = "calls" if count else "stop"
    if stop_string is not None:
        finish = "stop_string"
    elif turn.cut_by is not None:
        finish = "length"
    return Answer(
        id=answer_id,
        text=text,
        reasoning=turn.reasoning,
        calls=tuple(sent),
        finish=finish,
        stop_string=stop_string,
        written=written,
        **_collect_tokens(call, generation),
    )


def _limit_depth(call: ToolCall | InvalidToolCall) -> ToolCall | InvalidToolCall:
    """A call as clients can give it back; one that they cannot is sent as text."""
    if isinstance(call, ToolCall) and is_too_deep(call.arguments):
        reason = f"its arguments are nested too deeply; expected at most {MAX_DEPTH} levels"
        return InvalidToolCall(raw=call.raw, reason=reason)
    return call


def _collect_tokens(call: GatewayCall, generation: Generation) -> dict[str, Any]:
    """The fields of an answer about its tokens."""
    part = generation.kept_part()
    fields: dict[str, Any] = {"ids": array("i", part.ids), "log_probs": array("f", part.log_probs)}
    count = call.sampling.get("top_log_probs", 0)  # a row may hold more
    top = part.top() if call.wants_log_probs and count else None
    if top is not None:
        fields["top_ids"] = tuple(map(tuple, top[0][:, :count].tolist()))
        fields["top_log_probs"] = tuple(map(tuple, top[1][:, :count].tolist()))
    return fields


def make_turn(
    turn: AssistantTurn, answer: Answer, call: GatewayCall, conversation: AgentContext
) -> Turn:
    """What an answer is known by when it comes back; the conversation ends with the turn."""
    key, sent = hash_message(echo(answer, call), -1), answer.valid_calls
    valid = [each for each in map(_limit_depth, turn.calls) if isinstance(each, ToolCall)]
    return Turn(
        conversation=conversation,
        stop=len(conversation.transcript),
        content=key.content,
        reasoning=key.reasoning,
        ids=frozenset([answer.id, *(each.id[-ID_LENGTH:] for each in sent)]),
        calls=[(each.name, each.id) for each in valid] if call.allows_calls else [],
        sent_calls=len(sent),
    )


def echo(answer: Answer, call: GatewayCall) -> ClientMessage:
    """The message with which a client gives an answer back."""
    calls = []
    for each in answer.valid_calls:
        is_text = each.name in call.text_tools
        arguments: Any = {"input": write_text_input(each)} if is_text else each.arguments
        calls.append(ClientCall(each.name, arguments, each.id))
    return ClientMessage(
        role="assistant",
        text=answer.client_text,
        reasoning=answer.reasoning,
        calls=tuple(calls),
        ids=(answer.id,),
    )
