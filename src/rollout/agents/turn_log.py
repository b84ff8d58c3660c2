"""What remembers the answers that a trajectory got, and gives them again when it is resumed."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

from rollout.chat.plain_data import show_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.engine.pool.generation import Generation
    from rollout.token_prefix import TokenPrefix
    from rollout.tools.results import Answers
    from rollout.types import InvalidToolCall, ToolCall

#: What was asked: the number of tokens before it, the CRC-32 of their ids, and the seed of the turn
#: or the CRC-32 of the tool calls.
Question = tuple[int, int, int]
#: The session id of a conversation, and the number of a turn in it.
TurnId = tuple[str, int]


def make_turn_question(prefix: TokenPrefix, seed: int) -> Question:
    """Make the question of a turn that continues these tokens with this seed."""
    return prefix.length, prefix.compute_sum(), seed


def make_calls_question(
    prefix: TokenPrefix, calls: Sequence[ToolCall | InvalidToolCall]
) -> Question:
    """Make the question of calls that are made after these tokens."""
    return make_turn_question(prefix, zlib.crc32(show_value(list(calls)).encode()))


class TurnLog(Protocol):
    """Of one trajectory."""

    async def wait_written(self) -> None:
        """Wait until what was noted last is written."""

    async def recall_turn(
        self, prefix: TokenPrefix, seed: int, generation: Generation
    ) -> float | None:
        """Fill a generation as it was; the seconds that it took, None where nothing is known."""

    def note_turn(
        self, prefix: TokenPrefix, seed: int, turn: TurnId, generation: Generation, seconds: float
    ) -> bool:
        """A generation is over that continues `prefix`; whether to wait until it is written."""

    async def recall_answers(
        self, question: Question, segment: str, calls: Sequence[ToolCall | InvalidToolCall]
    ) -> Answers | None:
        """What was answered to these calls then; None where nothing is known."""

    def note_answers(
        self, question: Question, turn: TurnId, answers: Answers, stateful: Sequence[str]
    ) -> bool:
        """Calls have been answered; whether to wait until that is written.

        Args:
            stateful: Tools that were called and have a state, which no log restores.
        """
