"""Results of tools in the order of the calls that they answer, whatever order they ended in.

Results and calls belong together by their ids, turn by turn: other turns may use the same ids
again. Results without ids stand where they are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    role, calls, answers = (_read(message, name) for name in ("role", "tool_calls", "tool_call_id"))
    if role != "assistant":
        return MessageIds(str(role), (), str(answers or "") if role == "tool" else "")
    if not isinstance(calls, Iterable) or isinstance(calls, str | bytes | Mapping):
        calls = ()  # what is no list of calls is refused where it is converted
    return MessageIds(role, tuple(str(_read(call, "id") or "") for call in calls))


def _read(value: object, name: str) -> Any:
    return value.get(name, "") if isinstance(value, Mapping) else getattr(value, name, "")


def order_messages(messages: list[Message]) -> list[Message]:
    """The messages of a whole conversation, each turn's results in the order of its calls.

    Raises:
        TemplateError: As `result_order`.
    """
    order = result_order([message_ids(message) for message in messages])
    return messages if order is None else [messages[at] for at in order]


def result_order(
    messages: Sequence[MessageIds], before: Iterable[MessageIds] = (), *, is_checked: bool = True
) -> list[int] | None:
    """The order in which each turn's results are in that of its calls; None: as they are.

    Results change places among each other; all else stays.

    Args:
        messages: In the order given.
        before: Those before them, from the turn on whose calls the first results answer.
        is_checked: False orders what can be ordered and refuses nothing.

    Raises:
        TemplateError: Two calls of a turn, or two results, have the same id; a result's is that of
            none of the calls; or a call has no result where others have. Names the id.
    """
    turn, calls, answered = "the turn before them", tuple[str, ...](), set[str]()
    for message in before:
        if message.role == "assistant":
            calls, answered = message.calls, set()
        answered.add(message.answers)
    order, results = list(range(len(messages))), list[int]()
    for at, message in enumerate((*messages, MessageIds("assistant"))):
        if message.role != "assistant":
            results += [at] if message.answers else []
            continue
        answers = {each: messages[each].answers for each in results}
        if is_checked and results:
            _check_results(turn, calls, answered, answers)
        rank = {call: number for number, call in enumerate(calls)}
        known = [each for each in results if answers[each] in rank]
        ordered = sorted(known, key=lambda each: rank[answers[each]])
        for position, each in zip(known, ordered, strict=True):
            order[position] = each
        turn, calls, answered, results = f"messages[{at}]", message.calls, set(), []
        doubled = [call for call, count in Counter(calls).items() if call and count > 1]
        if is_checked and doubled:
            raise TemplateError(f"{turn}: two of its calls have the id {doubled[0]!r}")
    return None if order == list(range(len(order))) else order


def _check_results(
    turn: str, calls: Sequence[str], answered: set[str], answers: Mapping[int, str]
) -> None:
    """Refuse results, ids of calls by their positions, that are not those of a turn's calls."""
    known = Counter(filter(None, calls))  # the model may have given two calls one id
    found = Counter[str]()
    for at, call in answers.items():
        found[call] += 1
        if found[call] > (known[call] or 1) or call in answered:
            raise TemplateError(f"messages[{at}]: a second result of the call {call!r}")
        if known and call not in known:
            expected = ", ".join(map(repr, known))
            raise TemplateError(
                f"messages[{at}]: a result of the call {call!r}, which {turn} has not; "
                f"expected one of {expected}"
            )
    if missing := [repr(call) for call in known if call not in answered.union(found)]:
        names = ", ".join(missing)
        raise TemplateError(f"{turn}: no result of the call {names}; expected one of each call")
