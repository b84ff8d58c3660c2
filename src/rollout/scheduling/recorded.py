"""What calls know of a run's record: of a trajectory, and of a group that was pulled before."""

from __future__ import annotations

from typing import Protocol

import attrs

from rollout.agents.turn_log import TurnLog
from rollout.types import Prompt


class MemberLog(TurnLog, Protocol):
    """The log of one trajectory."""

    @property
    def is_finished(self) -> bool:
        """Whether an earlier process finished it."""

    @property
    def is_taken(self) -> bool:
        """Whether a caller of an earlier process had it."""

    def begin(self) -> None:
        """Begin an attempt from the start of its agent."""

    def delivered(self) -> None:
        """Note that the caller has it."""


@attrs.frozen
class RecordedGroup:
    """A prompt that an earlier process pulled.

    Attributes:
        number: Its number among all prompts that the run pulled.
        prompt: With the uid that its group had, or as its source gave it where none began.
        step: Of the call that began its members.
        call: The number of the group among those of its step with this uid; None: none began.
        delivered_in: The step of the call that delivered it; None: none did.
        version: The oldest weights that sampled for it; None: none did, or it was delivered.
    """

    number: int
    prompt: Prompt
    step: int = 0
    call: int | None = None
    delivered_in: int | None = None
    version: int | None = None
