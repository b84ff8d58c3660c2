"""Running counts of a runtime; admitted = finished + in flight, always."""

from __future__ import annotations

from collections import Counter

import attrs

from rollout.types import Outcome


@attrs.define(eq=False)
class Tally:
    """What a runtime has done so far.

    Attributes:
        admitted: Trajectories accepted by `generate` or `stream`.
        running: Those of them that hold a place and have not been delivered.
        carried: Those that were started, have no place, and wait for the next call.
        outcomes: Those that have ended, by outcome.
        generated_tokens: Sampled tokens that reached a transcript.
        tool_calls: Calls answered, errors included.
        unresponsive: Pieces of foreign code that did not end when cancelled, and were given up.
        cut_prompts: Prompts that have lost tokens, to fit.
        known_tokens: Tokens of their trajectory with which later generations began, and which an
            engine had computed or sampled before.
        reused_tokens: Those that it had not forgotten.
    """

    admitted: int = 0
    running: int = 0
    carried: int = 0
    outcomes: Counter[Outcome] = attrs.field(factory=Counter)
    generated_tokens: int = 0
    tool_calls: int = 0
    unresponsive: int = 0
    cut_prompts: int = 0
    known_tokens: int = 0
    reused_tokens: int = 0

    @property
    def finished(self) -> int:
        """Trajectories that have ended."""
        return self.outcomes.total()
