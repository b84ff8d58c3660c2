"""Running counts of a runtime; admitted = finished + in flight, always."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

import attrs

from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger("rollout")


@attrs.define(eq=False)
class ToolTally:
    """The calls of one tool.

    Attributes:
        calls: Those of it that have ended.
        failed: Those of them that raised, or took longer than they may.
        first: What the first one raised, with its traceback.
    """

    calls: int = 0
    failed: int = 0
    first: str = ""


@attrs.define(eq=False)
class Tally:
    """What a runtime has done so far.

    Attributes:
        admitted: Trajectories accepted by `generate` or `stream`.
        running: Those of them that hold a place and have not been delivered.
        carried: Those that were started, have no place, and wait for the next call.
        outcomes: Those that have ended, by outcome.
        generated_tokens: Sampled tokens that reached a transcript.
        tool_calls: Calls of the model's that have ended, however they did: the invalid ones too.
        tool_errors: Those of them whose answer was an error, or that were cancelled.
        tools: The same of each tool, and what it raised.
        turns_with_tools: Generations of a model that was offered tools.
        turns_with_calls: Those of them in which it called one, or tried to.
        hints: What was logged that is said once; see `hint`.
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
    tool_errors: int = 0
    tools: dict[str, ToolTally] = attrs.field(factory=dict)
    turns_with_tools: int = 0
    turns_with_calls: int = 0
    hints: set[str] = attrs.field(factory=set)
    unresponsive: int = 0
    cut_prompts: int = 0
    known_tokens: int = 0
    reused_tokens: int = 0

    def tool(self, name: str) -> ToolTally:
        """The calls of a tool, none at first."""
        known = self.tools.get(name)
        if known is None:
            known = self.tools[name] = ToolTally()
        return known

    def add_calls(self, metrics: Mapping[str, float]) -> None:
        """Count the calls of a trajectory that a journal has whole."""
        self.tool_calls += int(metrics.get("tool_calls", 0))
        self.tool_errors += int(metrics.get("tool_errors", 0))

    def hint(self, about: str, text: str) -> None:
        """Log what else passes in silence, once in a runtime.

        Args:
            about: What is not said again.
            text: Sentences that say what happened, how often, and what to do.
        """
        if about not in self.hints:
            self.hints.add(about)
            logger.warning("%s", text)

    @property
    def finished(self) -> int:
        """Trajectories that have ended."""
        return self.outcomes.total()
