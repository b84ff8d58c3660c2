"""What remembers the answers that a trajectory got, and gives them again when it is resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from rollout.token_prefix import TokenPrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.engine.pool.generation import Generation
    from rollout.tools import ToolResult
    from rollout.tools.answers import Answers, States
    from rollout.types import InvalidToolCall, ToolCall

#: What was asked for: where in a conversation, and what.
Place = tuple[int, int, int]


class AskedCalls(msgspec.Struct, frozen=True, gc=False):
    """Calls of tools, as they are remembered.

    Attributes:
        prefix, length: The conversation, and how many tokens it had before them.
        calls: They, encoded: tools may change what they are given.
    """

    prefix: TokenPrefix
    length: int
    calls: bytes


class TurnLog(Protocol):
    """Of one trajectory."""

    @property
    def has_answers(self) -> bool:
        """Whether there are any to give again."""

    async def room(self) -> None:
        """Until more can be taken."""

    async def kept(self) -> None:
        """Until what was noted last is written."""

    async def recall_turn(
        self, prefix: TokenPrefix, seed: int, generation: Generation
    ) -> float | None:
        """Fill a generation as it was; the seconds that it took, None where nothing is known."""

    def note_turn(
        self,
        prefix: TokenPrefix,
        seed: int,
        segment: str,
        turn: int,
        generation: Generation,
        seconds: float,
    ) -> bool:
        """A generation is over that continues `prefix`; whether to wait for `room`."""

    def asked(
        self, prefix: TokenPrefix, calls: Sequence[ToolCall | InvalidToolCall]
    ) -> AskedCalls | None:
        """What these calls ask; None where they cannot be remembered."""

    async def recall_answers(self, asked: AskedCalls, segment: str) -> Answers | None:
        """What was answered then; None where nothing is known."""

    def note_answers(
        self,
        asked: AskedCalls,
        segment: str,
        turn: int,
        results: Sequence[ToolResult],
        seconds: float,
        states: States | None,
    ) -> bool:
        """Calls have been answered; whether the trajectory is to wait for `room`."""
