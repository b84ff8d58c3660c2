"""How a turn ends, in one place: what its engine, its span and its trajectory call it.

| the engine said | the span's `finish_reason` | `cut_by` | a trajectory that returns then |
| --- | --- | --- | --- |
| stop | stop | None | completed |
| length | length | the path of the length that bounded it | length |
| abort, or nothing yet, past the deadline | deadline | the path of the deadline | its own ending |
| abort, or nothing yet | abort | abort | its own ending |
| error | error | error | its own ending |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.agents.identity import Ending
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.engine.core import FinishReason
    from rollout.limits import Deadline


class TurnEnd(msgspec.Struct, frozen=True):
    """The end of one generation.

    Attributes:
        finish_reason: Of its span in the transcript.
        cut_by: What ended it before the model did; see `AssistantTurn.cut_by`.
    """

    finish_reason: str
    cut_by: str | None

    @classmethod
    def of(
        cls, said: FinishReason | None, *, bounded_by: str, deadline: Deadline, now: float
    ) -> TurnEnd:
        """What an engine said, None where it was not waited for.

        Args:
            bounded_by: Path of the length that its budget came from.
            deadline: That of the generation; an engine may keep it before the driver does.
            now: Clock time.
        """
        match said or "abort":
            case "stop":
                return cls("stop", None)
            case "length":
                return cls("length", bounded_by)
            case "abort" if now >= deadline.at:
                return cls("deadline", deadline.source)
            case reason:
                return cls(reason, reason)


def natural_ending(finish_reason: str | None, cut_by: str | None) -> Ending:
    """The ending of a trajectory whose agent returned after a turn that ended so.

    Args:
        finish_reason: Of the last generated span; None where there is none.
        cut_by: Of the last turn.
    """
    if cut_by is None or finish_reason != "length":  # another cut is the agent's own
        return Ending(outcome=Outcome.COMPLETED, reason="")
    reason = cut_by.rpartition(".")[2]
    return Ending(outcome=Outcome.LENGTH, reason=reason, limit_source=cut_by)
