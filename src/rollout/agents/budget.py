"""How many tokens a trajectory may still have, and which length says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.agents.identity import RejectedPrompt
from rollout.errors import LimitExceeded
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.chat.transcript import Transcript
    from rollout.config import LengthsConfig


def length_error(source: str, what: str) -> LimitExceeded:
    """What a trajectory ends with when the length at `source` leaves no room."""
    return LimitExceeded(
        f"{source}: {what}",
        source=source,
        reason=source.rpartition(".")[2],
        outcome=Outcome.LENGTH,
    )


def longest_prompt(lengths: LengthsConfig, context_length: int) -> int:
    """Most tokens of a prompt that can be answered."""
    return min(lengths.prompt, context_length - 1)


def prompt_fault(count: str, lengths: LengthsConfig, context_length: int) -> RejectedPrompt:
    """Why a prompt of so many tokens, more than `longest_prompt`, cannot be run."""
    if lengths.prompt < context_length:
        text = f"the prompt has {count} tokens; lengths.prompt = {lengths.prompt}"
        return RejectedPrompt("prompt_length", text)
    text = f"the prompt has {count} tokens; the engine's context of {context_length} leaves no room"
    return RejectedPrompt("context_length", text)


def remaining(
    transcript: Transcript, lengths: LengthsConfig, context_length: int, kept_tokens: int = 0
) -> tuple[int, str]:
    """Tokens that may still be appended, and the path of the length that bounds them.

    Args:
        kept_tokens: So many are kept free.
    """
    length = len(transcript) + kept_tokens
    context = context_length - length
    response = lengths.response - (length - transcript.prompt_length)
    if context <= response:
        return context, "engine.context_length"
    return response, "lengths.response"


def generation_budget(
    transcript: Transcript,
    lengths: LengthsConfig,
    context_length: int,
    max_new_tokens: int | None,
    kept_tokens: int = 0,
) -> tuple[int, str]:
    """Most tokens of the next generation, and the path of the length that bounds it.

    Raises:
        LimitExceeded: Not one token fits.
    """
    room, source = remaining(transcript, lengths, context_length, kept_tokens)
    if room < 1:
        raise length_error(source, "there is no room for another token")
    budget = room, source
    if lengths.turn is not None:
        budget = min(budget, (lengths.turn, "lengths.turn"))
    if max_new_tokens is not None:
        budget = min(budget, (max_new_tokens, "sampling.max_new_tokens"))
    return budget
