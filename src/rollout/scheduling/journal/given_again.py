"""Answers of engines and tools as records hold them, and as they are given again."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import astuple

from rollout.agents.turn_log import AskedCalls
from rollout.chat.media_records import without_content
from rollout.chat.plain_data import encoder, exact_text
from rollout.medium import Media
from rollout.scheduling.journal.plain_data import plain, plain_items
from rollout.tools import ToolResult
from rollout.tools.answers import Answers

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Mapping, Sequence

    from rollout.agents.turn_log import Place
    from rollout.engine.pool.generation import Generation
    from rollout.scheduling.journal.entries import AnswersEntry, TurnEntry
    from rollout.token_prefix import TokenPrefix
    from rollout.types import InvalidToolCall, ToolCall

K = TypeVar("K")
_encode = encoder.encode
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)


def recall_into(generation: Generation, known: TurnEntry) -> float:
    """Fill a generation as it was; the seconds that it took."""
    generation.cached_tokens, generation.resumes = known.cached_tokens, known.resumes
    if known.top is not None:
        generation.top_count, generation.top_ids, generation.top_log_probs = known.top
    if known.experts is not None:
        layers, top_k, generation.expert_room, generation.routed_experts = known.experts
        generation.expert_shape = (layers, top_k)
    finish: Any = known.finish_reason
    generation.recall(known.ids, known.log_probs, known.versions, finish)
    return known.seconds


def answers_of(known: AnswersEntry, whole: Callable[[Media], Media]) -> Answers:
    """What was answered.

    Args:
        known: As it was written.
        whole: Gives a medium its content.
    """
    results = [_result(each, whole) for each in known.results]
    return Answers(results, known.seconds)


def place_of_turn(prefix: TokenPrefix, seed: int) -> Place:
    """Where a turn begins that has this seed."""
    length = prefix.length
    return length, prefix.compute_sum(length), seed


def next_known(known: dict[K, deque[Any]] | None, place: K, segment: str | None = None) -> Any:
    """The next answer there, of this segment where it has one; each is given once."""
    found = known.get(place) if known else None
    if not found or known is None:
        return None
    entry = next((each for each in found if each.segment == segment), found[0])
    found.remove(entry)
    if not found:
        del known[place]
    return entry


def asked_of(prefix: TokenPrefix, calls: Sequence[ToolCall | InvalidToolCall]) -> AskedCalls | None:
    """What is asked by these calls here; None where it cannot be remembered."""
    try:
        return AskedCalls(prefix, prefix.length, _encode(calls))
    except _UNENCODABLE:
        pass
    try:  # JSON has numbers of any size, and texts that UTF-8 cannot hold
        text = json.dumps(msgspec.to_builtins(calls))
    except _UNENCODABLE:
        return None
    return AskedCalls(prefix, prefix.length, text.encode())


def place_of_calls(asked: AskedCalls) -> Place:
    """Where these calls are made."""
    return asked.length, asked.prefix.compute_sum(asked.length), zlib.crc32(asked.calls)


def plain_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Snapshots as a record holds them.

    Raises:
        JournalError: One is no plain data.
    """
    return {name: plain(each, f"the snapshot of tool {name!r}") for name, each in states.items()}


#: What a result has besides its text, where that is all.
_BARE = astuple(ToolResult())[1:]
_RESULT_FIELDS = ("text", "data", "reward", "metrics", "is_error", "end_trajectory", "extra")
_TO_PLAIN = {"metrics": plain_items, "extra": plain_items}


def fields_of(results: Sequence[ToolResult]) -> tuple[list[str | list[Any]], bool]:
    """Results as a record holds them, and whether text is all that there is of each, as a rule.

    Raises:
        JournalError: One holds what is no plain data.
    """
    fields: list[str | list[Any]] = []
    are_texts = True
    for each in results:
        text = each.text
        if each.data is None and astuple(each)[1:] == _BARE:
            if type(text) is not str or not text.isascii():
                text = str(plain(exact_text(text), f"answers[{len(fields)}].text"))
            fields.append(text)
        else:
            fields.append(_fields(each, len(fields)))
            are_texts = False
    return fields, are_texts


def _fields(result: ToolResult, at: int) -> list[Any]:
    fields = [
        _TO_PLAIN.get(name, plain)(getattr(result, name), f"answers[{at}].{name}")
        for name in _RESULT_FIELDS
    ]
    if result.has_media:
        fields += ([without_content(m) for m in each] for each in shown(result))
    return fields


def shown(result: ToolResult) -> tuple[Sequence[Media], Sequence[Media]]:
    """Images and videos of an answer, which were read."""
    return result.images, result.videos


def _result(fields: str | list[Any], whole: Callable[[Media], Media]) -> ToolResult:
    if isinstance(fields, str):
        return ToolResult(fields)
    count = len(_RESULT_FIELDS)
    own = dict(zip(_RESULT_FIELDS, fields[:count], strict=True))
    for kind, media in zip(("images", "videos"), fields[count:], strict=False):
        own[kind] = [whole(msgspec.convert(each, Media)) for each in media]
    return ToolResult(**own)
