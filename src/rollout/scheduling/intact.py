"""What an agent left of the context that it was given: it may have assigned anything to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.agents.identity import Ending
from rollout.chat.transcript import Transcript
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.agents.context import AgentContext

#: The attributes that become part of a trajectory, each with its type.
_KINDS: dict[str, type[Any]] = {
    "transcript": Transcript,
    "earlier": list,
    "messages": list,
    "extra": dict,
    "turn_scores": list,
    "tool_rewards": list,
    "restarts": list,
    "assistant_turns": int,
    "user_turns": int,
    "cached_tokens": int,
    "resumes": int,
    "discarded_tokens": int,
    "generation_s": float,
}
_LISTS_OF_NUMBERS = ("turn_scores", "tool_rewards")


def restore(context: AgentContext) -> str:
    """Give what an agent spoilt its initial value again; returns what was wrong, in words."""
    faults = []
    for name, kind in _KINDS.items():
        value = getattr(context, name)
        if not isinstance(value, kind) or not _has_sound_items(name, value):
            faults.append(f"context.{name} = {type(value).__name__}: expected {_expected(name)}")
            setattr(context, name, kind())
    if not _is_sound_ending(context.ending):
        faults.append("context.ending: expected what context.end(outcome, reason) makes of it")
        context.ending = None
    if not isinstance(context.cut_by, str | None):
        faults.append("context.cut_by: expected text or None")
        context.cut_by = None
    return "; ".join(faults)


def _has_sound_items(name: str, value: Any) -> bool:
    if name not in _LISTS_OF_NUMBERS:
        return True
    return all(isinstance(item, int | float) and not isinstance(item, bool) for item in value)


def _expected(name: str) -> str:
    numbers = " of numbers" if name in _LISTS_OF_NUMBERS else ""
    return f"{_KINDS[name].__name__}{numbers}"


def _is_sound_ending(ending: Any) -> bool:
    if ending is None:
        return True
    return (
        isinstance(ending, Ending)
        and isinstance(ending.outcome, Outcome)
        and isinstance(ending.reason, str)
        and isinstance(ending.limit_source, str | None)
    )
