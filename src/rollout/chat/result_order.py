"""Results of tools in the order of the calls that they answer, whatever order they ended in.

Results and calls belong together by their ids, turn by turn: other turns may use the same ids
again. Results without ids stand where they are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.errors import TemplateError

if TYPE_CHECKING:
    from rollout.types import Message


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


def message_ids(message: object) -> MessageIds:
    """Those of a `Message`, or of a mapping; of anything else, none."""
    read = message.get if isinstance(message, Mapping) else partial(getattr, message)
    role, calls, answers = read("role", ""), read("tool_calls", ""), read("tool_call_id", "")
    if role != "assistant":
        return MessageIds(str(role), (), str(answers or "") if role == "tool" else "")
    if not isinstance(calls, Iterable) or isinstance(calls, str | bytes | Mapping):
        calls = ()  # what is no list of calls is refused where it is converted
    return MessageIds(role, tuple([str(_read_id(call) or "") for call in calls]))


def _read_id(call: object) -> Any:
    return call.get("id") if isinstance(call, Mapping) else getattr(call, "id", "")


def order_messages(messages: list[Message]) -> list[Message]:
    """The messages of a whole conversation, each turn's results in the order of its calls.

    Raises:
        TemplateError: As `result_order`.
    """
    return [messages[at] for at in result_order([message_ids(each) for each in messages])]


def result_order(
    messages: Sequence[MessageIds], before: Sequence[MessageIds] = (), *, is_checked: bool = True
) -> list[int]:
    """The order in which each turn's results are in that of its calls.

    Results change places among each other; all else stays.

    Args:
        messages: In the order given.
        before: Those before them, from the turn on whose calls the first results answer.
        is_checked: False orders what can be ordered and refuses nothing.

    Raises:
        TemplateError: Two calls of a turn, or two results, have the same id; a result's is that of
            none of the calls; or a call has no result where others have. Names the id.
    """
    order, every = list(range(len(messages))), (*before, *messages)
    turns = [at for at, message in enumerate(every) if message.role == "assistant"]
    for start, stop in zip((-1, *turns), (*turns, len(every)), strict=True):
        at, calls = start - len(before), every[start].calls if start >= 0 else ()
        results = {  # by their positions, which are negative of those before
            each - len(before): every[each].answers
            for each in range(start + 1, stop)
            if every[each].answers
        }
        if tuple(results.values()) == calls and len(results) == len(set(calls)):
            continue  # they are in order
        if is_checked:
            _check_turn(at, calls, results)
        rank = {call: number for number, call in enumerate(calls)}
        known = [each for each, call in results.items() if each >= 0 and call in rank]
        ordered = sorted(known, key=lambda each: rank[results[each]])
        for position, each in zip(known, ordered, strict=True):
            order[position] = each
    return order


def _check_turn(at: int, calls: Sequence[str], results: Mapping[int, str]) -> None:
    """Refuse a turn, or results after it, whose ids do not belong together.

    Args:
        at: The position of the turn; negative where it was given before, and may be any.
        results: Ids of calls, by the positions of their results.
    """
    turn = f"messages[{at}]" if at >= 0 else "the turn before them"
    known, found = Counter(filter(None, calls)), Counter[str]()
    doubled = [call for call, count in known.items() if count > 1]
    if at >= 0 and doubled:  # a model may give two calls one id
        raise TemplateError(f"{turn}: two of its calls have the id {doubled[0]!r}")
    for position, call in results.items():
        found[call] += 1
        if position >= 0 and found[call] > (known[call] or 1):
            raise TemplateError(f"messages[{position}]: a second result of the call {call!r}")
        if position >= 0 and known and call not in known:
            expected = ", ".join(map(repr, known))
            raise TemplateError(
                f"messages[{position}]: a result of the call {call!r}, which {turn} has not; "
                f"expected one of {expected}"
            )
    missing = ", ".join(repr(call) for call in known if call not in found)
    if missing and max(results, default=-1) >= 0:
        raise TemplateError(f"{turn}: no result of the call {missing}; expected one of each call")
