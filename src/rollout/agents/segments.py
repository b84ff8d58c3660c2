"""Rows of a trajectory's conversations, which become its segments."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rollout.chat.transcript import Transcript
from rollout.errors import AgentError
from rollout.types import Message
from rollout.utf8 import is_name


class Row(msgspec.Struct, eq=False):
    """The tokens of a conversation up to where its history is rendered differently.

    Attributes:
        parent, position: The row that it departs from, and after how many of its tokens.
        seeds: Of the generations in it.
        messages: The conversation up to its end; None where the conversation still has it.
        token_rewards: Rewards of single tokens, by their positions.
    """

    transcript: Transcript
    purpose: str
    parent: Row | None = None
    position: int = 0
    seeds: list[int] = []
    messages: Sequence[Message] | None = None
    token_rewards: dict[int, float] = {}


def spread_rewards(row: Row) -> array[float] | None:
    """One for each token after the prompt; None where no token has any."""
    if not row.token_rewards:
        return None
    values = array("f", bytes(4 * row.transcript.response_length))
    for position, value in row.token_rewards.items():
        values[position - row.transcript.prompt_length] = value
    return values


def check_purpose(purpose: Any) -> None:
    """Check that a segment can have this purpose.

    Raises:
        AgentError: It cannot.
    """
    if not is_name(purpose):
        raise AgentError(f"purpose = {purpose!r:.80}: expected a non-empty string in UTF-8")


def check_ids(ids: Any, vocab_size: int, what: str = "observe_ids") -> array[int]:
    """Pack token ids.

    Args:
        vocab_size: 0 where nobody knows it.
        what: The function that got them, for messages.

    Raises:
        AgentError: They are no sequence of integers, or outside the vocabulary.
    """
    try:
        values = np.asarray(ids)
    except (ValueError, TypeError) as error:
        raise AgentError(f"{what}: {error}; expected a sequence of token ids") from error
    if values.size == 0:
        return array("i")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise AgentError(
            f"{what}: {values.ndim} dimensions of {values.dtype}; expected a sequence of token ids"
        )
    wrong = np.flatnonzero((values < 0) | (values >= (vocab_size or 2**31)))
    if len(wrong):
        raise AgentError(
            f"{what}: id {values[wrong[0]]} at {wrong[0]} is outside the engine's vocabulary "
            f"of {vocab_size} ids"
        )
    return array("i", values.astype(np.int32).tobytes())
