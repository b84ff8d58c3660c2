"""A generated turn as a client is told of it, and the forms in which it may come back."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.gateway.apis.reading import MAX_DEPTH, is_too_deep
from rollout.gateway.apis.writing import text_input
from rollout.gateway.calls import ID_LENGTH, Answer, GivenCall, GivenMessage, call_id, told_text
from rollout.gateway.identity import Digest, reasoning_key, said_key
from rollout.gateway.tree import Turn
from rollout.types import InvalidToolCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.agents import AssistantTurn, Conversation
    from rollout.engine.pool.generation import Generation
    from rollout.gateway.calls import Finish, GatewayCall


class Told(msgspec.Struct, frozen=True):
    """An answer, and what its turn is known by in the tree.

    Attributes:
        said: Keys of the forms in which it may come back.
    """

    answer: Answer
    said: tuple[Digest, ...]
    turn: Turn


def minted(*parts: object) -> str:
    """An id that is the same for the same parts."""
    text = "\x1f".join(map(str, parts))
    return hashlib.blake2b(text.encode(), digest_size=ID_LENGTH // 2).hexdigest()


def told(
    said: AssistantTurn,
    call: GatewayCall,
    conversation: Conversation,
    generations: Sequence[Generation],
    *,
    answer_id: str,
    stop_string: str | None,
) -> Told:
    """What a client is told of a turn that its call generated.

    Args:
        said: The turn, up to where a stop string begins.
        call: What was asked for.
        conversation: It ends with the turn.
        generations: All that the turn is made of.
        answer_id: The answer's.
        stop_string: What ended it, where one did.
    """
    calls, text, written = tuple(map(_tellable, said.calls)), said.content, said.written
    if calls != said.calls:
        written = None
    if call.tool_choice == "none":
        written = None
        text, calls = "\n".join(filter(None, [text, *(each.raw for each in calls)])), ()
    valid = [each for each in calls if isinstance(each, ToolCall)]
    shown = valid if call.parallel_calls else valid[:1]
    named = {
        id(each): msgspec.structs.replace(each, id=call_id(answer_id, at))
        for at, each in enumerate(shown)
    }
    answer = _with_tokens(
        Answer(
            id=answer_id,
            text=text,
            reasoning=said.reasoning,
            calls=tuple(
                named.get(id(each), each)
                for each in calls
                if isinstance(each, InvalidToolCall) or id(each) in named
            ),
            finish=_finish(said, bool(shown), stop_string),
            stop_string=stop_string,
            written=written,
            ids=array("i"),
            log_probs=array("f"),
        ),
        call,
        generations,
    )
    turn = Turn(
        conversation,
        len(conversation.transcript),
        reasoning=reasoning_key(said.reasoning),
        ids=frozenset([answer_id, *(each.id[-ID_LENGTH:] for each in named.values())]),
        calls=[(each.name, each.id) for each in valid],
        told=len(shown),
        asker=call.asker,
    )
    values = [(each.name, each.arguments) for each in shown]
    forms = [said_key(told_text(answer), values), said_key(answer.text, values)]
    if call.text_tools:
        told_values = [(each.name, _told_arguments(each, call)) for each in shown]
        forms += [said_key(text, told_values) for text in (told_text(answer), answer.text)]
    return Told(answer, tuple(forms), turn)


def _told_arguments(each: ToolCall, call: GatewayCall) -> Any:
    """Those of a call as the client gives it back."""
    return {"input": text_input(each)} if each.name in call.text_tools else each.arguments


def given_back(answer: Answer) -> GivenMessage:
    """The message with which a client would say it again."""
    return GivenMessage(
        role="assistant",
        text=told_text(answer),
        reasoning=answer.reasoning,
        calls=tuple(
            GivenCall(each.name, each.arguments, each.id)
            for each in answer.calls
            if isinstance(each, ToolCall)
        ),
        ids=(answer.id,),
    )


def _tellable(call: ToolCall | InvalidToolCall) -> ToolCall | InvalidToolCall:
    """A call as clients can give it back; one that they cannot is told as text."""
    if not isinstance(call, ToolCall) or sum(map(call.raw.count, "{[(")) <= MAX_DEPTH:
        return call
    if is_too_deep(call.arguments):
        reason = f"its arguments are nested too deeply; expected at most {MAX_DEPTH} levels"
        return InvalidToolCall(raw=call.raw, reason=reason)
    return call


def _finish(said: AssistantTurn, has_calls: bool, stop_string: str | None) -> Finish:
    if stop_string is not None:
        return "stop_string"
    if said.cut_by is not None:
        return "length"
    return "calls" if has_calls else "stop"


def _with_tokens(answer: Answer, call: GatewayCall, generations: Sequence[Generation]) -> Answer:
    kept = [generation.kept_part() for generation in generations]
    ids, log_probs = array("i"), array("f")
    versions: list[int] = []
    top_ids: list[tuple[int, ...]] = []
    top_log_probs: list[tuple[float, ...]] = []
    for each in kept:
        ids += each.ids
        log_probs += each.log_probs
        if call.wants_log_probs or call.wants_ids:
            versions += [version for version, count in each.versions for _ in range(count)]
        top = each.top() if call.wants_log_probs else None
        if top is not None:
            top_ids += map(tuple, top[0].tolist())
            top_log_probs += map(tuple, top[1].tolist())
    return msgspec.structs.replace(
        answer,
        ids=ids,
        log_probs=log_probs,
        weight_versions=tuple(versions),
        top_ids=tuple(top_ids),
        top_log_probs=tuple(top_log_probs),
    )
