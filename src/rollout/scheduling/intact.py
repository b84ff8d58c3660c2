"""What an agent left of the context that it was given: it may have assigned anything to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.agents.identity import Ending
from rollout.chat.reward_values import BadRewardError, finite_number
from rollout.types import Outcome
from rollout.utf8 import is_encodable

if TYPE_CHECKING:
    from rollout.agents.context import AgentContext
    from rollout.agents.conversation import Conversation

#: The attributes that become part of a trajectory, each with its type.
_KINDS: dict[str, type[Any]] = {
    "extra": dict,
    "turn_scores": list,
    "tool_rewards": list,
    "restarts": list,
    "generations": int,
    "cached_tokens": int,
    "resumes": int,
    "discarded_tokens": int,
    "cut_prompt_tokens": int,
    "sampled_placeholders": int,
    "truncated_tokens": int,
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
    for conversation in context.main.all():
        faults += _restore_conversation(conversation)
    return "; ".join(faults)


def _restore_conversation(conversation: Conversation) -> list[str]:
    where, faults = f"the conversation {conversation.session_id}", []
    for name in ("assistant_turns", "user_turns"):
        if not isinstance(getattr(conversation, name), int):
            faults.append(f"{where}: {name}: expected int")
            setattr(conversation, name, 0)
    if not isinstance(conversation.cut_by, str | None):
        faults.append(f"{where}: cut_by: expected text or None")
        conversation.cut_by = None
    if not isinstance(conversation.trainable, bool | None):
        faults.append(f"{where}: trainable = {conversation.trainable!r:.80}: expected bool or None")
        conversation.trainable = None
    given, conversation.reward = conversation.reward, None
    if given is not None:
        try:
            conversation.reward = finite_number(given, where)
        except BadRewardError:
            faults.append(f"{where}: reward = {given!r:.80}: expected a finite number")
    return faults


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
        and is_encodable(ending.reason + (ending.limit_source or ""))
    )
