"""Which messages the model said in a segment, and so what each of its generated spans called.

A segment's messages also hold what it did not say there: the prompt's examples, turns that a branch
took over from its parent, answers that an agent made up. Its spans say which are its own: the last
turn of a segment is its last generated span, so that both are read from the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.chat.trajectory import COMPACTION
from rollout.seeds import split_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.observe.report.saved_trajectories import (
        SavedCall,
        SavedMessage,
        SavedSegment,
        SavedSpan,
    )

GENERATED = "generated"


def calls_of(rows: Sequence[SavedSegment]) -> list[list[list[dict[str, Any]]]]:
    """For each segment, for each of its generated spans, the calls in it with what answered them.

    A call that nothing has answered has the result None; one that could not be parsed has nothing
    but a result.
    """
    found: list[list[list[dict[str, Any]]]] = []
    first: int | None = None  # of the segment behind, its first own message
    for at in reversed(range(len(rows))):
        messages = rows[at].messages or []
        end = first if first is not None and _goes_on(rows, at) else len(messages)
        places = _places(rows[at].spans or [], messages, end)
        found.append([_calls(messages, place) for place in places])
        first = min((place for place in places if place is not None), default=end)
    return found[::-1]


def turns_of(rows: Sequence[SavedSegment]) -> list[tuple[str | None, list[int]]]:
    """For each segment, its conversation as events name it, and the turns of its generated spans.

    Turns are counted from 1 over all segments of a conversation. Where a record does not say which
    conversation a segment is of, that is None, and they are counted in the segment.
    """
    counted: dict[str, int] = {}
    found: list[tuple[str | None, list[int]]] = []
    for at, row in enumerate(rows):
        path = None if at and not row.session_id else split_session(row.session_id)[1]
        size = sum(span.kind == GENERATED for span in row.spans or ())
        before = 0 if path is None else counted.get(path, 0)
        found.append((path, list(range(before + 1, before + size + 1))))
        if path is not None:
            counted[path] = before + size
    return found


def _goes_on(rows: Sequence[SavedSegment], at: int) -> bool:
    """Whether the next segment is the same conversation, whose history was rendered again."""
    this, following = rows[at], rows[at + 1]
    is_next = following.purpose == COMPACTION and following.parent and following.parent[0] == at
    return bool(is_next) and following.messages == this.messages


def _places(
    spans: Sequence[SavedSpan], messages: Sequence[SavedMessage], end: int
) -> list[int | None]:
    """Of each generated span the message that it ends; None: it is in none, or continues there."""
    places: list[int | None] = []
    heard = 0
    for at in reversed(range(len(spans))):
        if spans[at].kind != GENERATED:
            heard += 1
            continue
        if places and not heard:
            place = _adjacent(messages, end, _text(spans, at))
        else:
            place = _last_said(messages, end, _text(spans, at), heard - 1)
        places.append(place)
        end = end if place is None else place
        heard = 0
    return places[::-1]


def _adjacent(messages: Sequence[SavedMessage], end: int, text: str | None) -> int | None:
    """Of a span before another one of the same turn, or of a turn that nothing answered."""
    is_said = end > 0 and messages[end - 1].role == "assistant"
    return end - 1 if is_said and _may_say(text, messages[end - 1]) else None


def _last_said(
    messages: Sequence[SavedMessage], end: int, text: str | None, silences: int
) -> int | None:
    """The last message before `end` that the model may have said with this text.

    Where several observations follow each other, each but the first one comes after a turn in which
    nothing was said, and which no span has: so many `silences` at most are passed over.
    """
    for at in reversed(range(end)):
        message = messages[at]
        if message.role != "assistant":
            continue
        if silences > 0 and not (message.content or message.tool_calls):
            silences -= 1
        elif _may_say(text, message):
            return at
    return None


def _text(spans: Sequence[SavedSpan], at: int) -> str | None:
    """Of a span and of those before it, to an observation: a branch may continue within a turn.

    None where the record has no texts.
    """
    start = at
    while start > 0 and spans[start].kind == GENERATED:
        start -= 1
    texts = [span.text for span in spans[start : at + 1]]
    known = [text for text in texts if text is not None]
    return "".join(known) if len(known) == len(texts) else None


def _may_say(text: str | None, message: SavedMessage) -> bool:
    """Whether the calls and the first word of a message stand in a text, where that is known."""
    if text is None:
        return True
    words = (message.content or "").split(maxsplit=1)[:1]
    return all(part in text for part in (*words, *(call.raw for call in message.tool_calls)))


def _calls(messages: Sequence[SavedMessage], place: int | None) -> list[dict[str, Any]]:
    """The calls of a message, each with what the messages up to the next turn answer."""
    if place is None:
        return []
    heard = []
    for message in messages[place + 1 :]:
        if message.role == "assistant":
            break
        if message.role == "tool":
            heard.append(message)
    calls = messages[place].tool_calls
    told: list[dict[str, Any]] = [
        {"name": call.name, "arguments": call.arguments, "raw": call.raw, "result": None}
        for call in calls
    ]
    open_ = dict(enumerate(calls))
    for message in heard:
        answered = next((at for at in open_ if _answers(message, open_[at])), None)
        if answered is None and not message.name and len(heard) == len(calls):
            answered = min(open_)  # an agent's own words for each of its calls, in order
        if answered is None:
            told.append(_unparsed(message))
        else:
            del open_[answered]
            told[answered]["result"] = message.content or ""
    return told


def _answers(message: SavedMessage, call: SavedCall) -> bool:
    if message.tool_call_id and call.id:
        return message.tool_call_id == call.id
    return message.name == call.name


def _unparsed(message: SavedMessage) -> dict[str, Any]:
    """What answers none of the calls: one that could not be parsed is in no message."""
    result = message.content or ""
    return {"name": message.name or "", "arguments": None, "raw": "", "result": result}
