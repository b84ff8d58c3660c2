"""Results of tools in the order of the calls that they answer, whatever order they ended in.

Results and calls belong together by their ids, turn by turn: other turns may use the same ids
again. Results without ids stand where they are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollout.errors import TemplateError
from rollout.types import Message, ToolCall


class MessageIds(NamedTuple):
    """What orders messages.

    Attributes:
        role: The message's.
        calls: Of an assistant's turn: the ids of its calls, "" of one that has none.
        answers: Of a tool's result: the id of the call that it answers, "" where it has none.
    """

    role: str
    calls: tuple[str, ...] = ()
    answers: str = ""


class TurnCalls(NamedTuple):
    """The calls of a turn that messages follow.

    Attributes:
        ids: Of the calls, in order.
        answered: Those of them that have their results.
    """

    ids: tuple[str, ...] = ()
    answered: frozenset[str] = frozenset()

    def after(self, messages: Iterable[MessageIds]) -> TurnCalls:
        """Those that what comes next follows, once these messages are said."""
        ids, answered = self
        for role, calls, answers in messages:
            if role == "assistant":
                ids, answered = calls, frozenset()
            elif role == "tool" and answers:
                answered |= {answers}
        return TurnCalls(ids, answered)


NO_CALLS = TurnCalls()


def message_ids(message: object) -> MessageIds:
    """Those of a `Message`, or of a mapping; of anything else, none."""
    role: Any
    calls: Any
    answers: Any
    if isinstance(message, Message):
        role, calls, answers = message.role, message.tool_calls, message.tool_call_id
    elif isinstance(message, Mapping):
        role, calls = message.get("role"), message.get("tool_calls")
        answers = message.get("tool_call_id")
    else:
        return MessageIds("")
    if role == "assistant":
        return MessageIds(role, _call_ids(calls))
    return MessageIds(str(role), (), str(answers or "") if role == "tool" else "")


def _call_ids(calls: Any) -> tuple[str, ...]:
    if calls is None or isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Iterable):
        return ()  # what is no list of calls is refused where it is converted
    return tuple(map(_call_id, calls))


def _call_id(call: object) -> str:
    if isinstance(call, ToolCall):
        return call.id
    return str(call.get("id") or "") if isinstance(call, Mapping) else ""


def order_messages(messages: list[Message]) -> list[Message]:
    """The messages of a whole conversation, each turn's results in the order of its calls.

    Raises:
        TemplateError: As `result_order`.
    """
    order = result_order([message_ids(message) for message in messages])
    return messages if order is None else [messages[at] for at in order]


def result_order(
    messages: Sequence[MessageIds], before: TurnCalls = NO_CALLS, *, is_checked: bool = True
) -> list[int] | None:
    """The order in which each turn's results are in that of its calls; None: as they are.

    Results change places among each other; all else stays.

    Args:
        messages: In the order given.
        before: The calls of the turn that the first of them follow.
        is_checked: False orders what can be ordered and refuses nothing.

    Raises:
        TemplateError: Two calls of a turn, or two results, have the same id; a result's is that of
            none of the calls; or a call has no result where others have. Names the id.
    """
    turns = [("the turn before them", before, list[int]())]
    for at, message in enumerate(messages):
        if message.role == "assistant":
            turns.append((f"messages[{at}]", TurnCalls(message.calls), []))
        elif message.role == "tool" and message.answers:
            turns[-1][2].append(at)
    order = list(range(len(messages)))
    for turn, calls, results in turns:
        if is_checked:
            _refuse_doubled(turn, calls, before)
        if is_checked and results:
            _check(turn, calls, results, [messages[at].answers for at in results])
        rank = {call: at for at, call in enumerate(calls.ids)}
        known = [at for at in results if messages[at].answers in rank]
        ordered = sorted(known, key=lambda at: rank[messages[at].answers])
        for place, at in zip(known, ordered, strict=True):
            order[place] = at
    return None if order == list(range(len(order))) else order


def _refuse_doubled(turn: str, calls: TurnCalls, before: TurnCalls) -> None:
    ids = calls.ids
    doubled = next((each for at, each in enumerate(ids) if each and each in ids[:at]), None)
    if doubled is not None and calls is not before:  # the model may have given two calls one id
        raise TemplateError(f"{turn}: two of its calls have the id {doubled!r}")


def _check(turn: str, calls: TurnCalls, results: Sequence[int], ids: Sequence[str]) -> None:
    known = Counter(filter(None, calls.ids))  # the model may have given two calls one id
    found = Counter[str]()
    for at, each in zip(results, ids, strict=True):
        found[each] += 1
        if found[each] > (known[each] or 1) or each in calls.answered:
            raise TemplateError(f"messages[{at}]: a second result of the call {each!r}")
        if known and each not in known:
            expected = ", ".join(map(repr, known))
            raise TemplateError(
                f"messages[{at}]: a result of the call {each!r}, which {turn} has not; "
                f"expected one of {expected}"
            )
    missing = [each for each in known if each not in found and each not in calls.answered]
    if missing:
        names = ", ".join(map(repr, missing))
        raise TemplateError(f"{turn}: no result of the call {names}; expected one of each call")
