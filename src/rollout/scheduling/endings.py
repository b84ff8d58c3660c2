"""Failed and rejected trajectories of a call: counted, and logged once for each cause."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from rollout.agents.trajectory_state import UNRESPONSIVE
from rollout.errors import LimitExceeded
from rollout.plurals import count
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory
    from rollout.config import SchedulingConfig
    from rollout.observe.tally import Tally

logger = logging.getLogger("rollout.scheduling")

#: Reason of trajectories that were cancelled because the runtime was closed.
CLOSED = "closed"
#: Reason of a failure by an agent that returned without one generated token.
NEVER_GENERATED = "never_generated"
#: Turns of models that were offered tools and called none, from which on that says something.
SILENT_TURNS = 4
#: Causes of failures that are logged, or listed in an error; the others are counted.
LISTED_CAUSES = 5
#: Of what an error said, in a line of the log; the trajectory's `cause` has all of it.
SHOWN_CHARACTERS = 400

#: Outcome, reason, and what an error said.
_Cause = tuple[Outcome, str, str]


class BadEndings:
    """Failed and rejected trajectories of one call, by cause.

    Args:
        tally: Of the runtime, which knows what was logged before.

    Attributes:
        failures: How many failed, by cause, of those that count for `scheduling.max_failures`.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally, self._count = tally, 0
        self.failures: Counter[str] = Counter()
        self._counts: dict[Outcome, Counter[_Cause]] = {
            Outcome.REJECTED: Counter(),
            Outcome.FAILED: Counter(),
        }
        #: Of each cause the first trajectory in the order of the prompts, and what it says.
        self._first: dict[_Cause, tuple[int, int, str]] = {}

    def add(self, trajectory: Trajectory, *, is_free: bool = False) -> None:
        """Count one that has ended, if it failed or was rejected.

        Args:
            is_free: Whether it is logged but does not count for `scheduling.max_failures`: it is
                surplus, or restarted.
        """
        outcome = trajectory.outcome
        self._count += 1
        if outcome not in self._counts:
            return
        key: _Cause = (outcome, trajectory.reason, "")  # rejections: one line for each reason
        if outcome is Outcome.FAILED:
            self.failures[_words(trajectory)] += not is_free
            key = (outcome, trajectory.reason, _words(trajectory))
        self._counts[outcome][key] += 1
        place = (trajectory.group, trajectory.member)
        first = self._first.get(key)
        if first is None and len(self._first) < LISTED_CAUSES:
            logger.info("%s; others of this cause are counted", describe_ending(trajectory))
        if first is None or place < first[:2]:
            self._first[key] = (*place, describe_ending(trajectory))

    def are_too_many(self, count: int, config: SchedulingConfig) -> bool:
        """Whether more have failed, of `count`, than `scheduling.max_failures` allows."""
        failed, most = self.failures.total(), config.max_failures
        return most is not None and failed > most and failed > config.max_failure_share * count

    def error(self, count: int, config: SchedulingConfig) -> LimitExceeded:
        """What a call of `count` trajectories ends with of which too many have failed."""
        causes = self.failures
        listed = causes.most_common(LISTED_CAUSES)
        lines = "".join(f"\n  {times} × {words}" for words, times in listed)
        more = len(causes) - len(listed)
        return LimitExceeded(
            f"{causes.total()} of {count} trajectories failed "
            f"(scheduling.max_failures = {config.max_failures}, scheduling."
            f"max_failure_share = {config.max_failure_share:g}); the batch stopped:"
            + lines
            + (f"\n  and {more} further causes" if more else ""),
            source="scheduling.max_failures",
            reason="failures",
            outcome=Outcome.FAILED,
        )

    def log(self) -> None:
        """One line for each reason of rejections, and for each frequent cause of failures.

        And what else would pass in silence, once in the runtime.
        """
        self._hint_at_agents()
        _hint_at_tools(self._tally)
        for counts, most in zip(self._counts.values(), (None, LISTED_CAUSES), strict=True):
            listed = [
                (key, number)
                for at, (key, number) in enumerate(counts.most_common())
                if most is None or at < most or key[1] == UNRESPONSIVE  # each is named
            ]
            for key, number in listed:
                logger.warning("%s (%s)", self._first[key][2], count(number, "trajectory"))
            rest = counts.total() - sum(number for _, number in listed)
            if rest:
                causes = count(len(counts) - len(listed), "further cause")
                logger.warning("%s failed of %s", count(rest, "trajectory"), causes)

    def _hint_at_agents(self) -> None:
        """Those that never had the model generate, which are no others' failures."""
        failed = self._counts[Outcome.FAILED]
        for key in [key for key in failed if key[1] == NEVER_GENERATED]:
            number, (_, _, first) = failed.pop(key), self._first.pop(key)
            self._tally.hint(
                key[2],
                f"{first}. So ended {number:,} of {count(self._count, 'trajectory')}; nothing is "
                f"learned from them. An agent has the model generate by `await context.generate()`"
                f", or by requests to its task's `base_url` with its `api_key`.",
            )


def _hint_at_tools(tally: Tally) -> None:
    """Tools that raised, and tools that no model called."""
    for name, tool in tally.tools.items():
        if tool.failed:
            tally.hint(
                f"tool {name}",
                f"The tool {name!r} raised, or took too long, in {tool.failed:,} of "
                f"{count(tool.calls, 'call')}. The model reads that as the tool's answer, and no "
                f"trajectory fails of it: mend the tool, or have it return what the model is to "
                f"read. The first time:\n{tool.first.rstrip()}",
            )
    if tally.turns_with_tools >= SILENT_TURNS and not (tally.turns_with_calls or tally.tool_calls):
        tally.hint(
            "tools",
            f"Tools were offered in {tally.turns_with_tools:,} turns, and the model called none in "
            f"any. Look at a transcript: is agent.tool_format the format that this model calls "
            f"tools in, does the prompt say what they are for, and is there room for a call "
            f"(lengths.response)?",
        )


def describe_ending(first: Trajectory) -> str:
    """Say in a line which trajectory ended how, and of what."""
    if first.outcome is Outcome.FAILED and first.reason == "reward":
        what = f"reward of {first.uid} failed"
    elif first.outcome is Outcome.FAILED and first.reason == "group_reward":
        what = f"group reward of {first.uid} failed"
    else:
        what = f"{first.uid}/{first.member} {first.outcome} ({first.reason})"
    cause = first.cause
    if cause is None:
        return what
    if first.outcome is Outcome.REJECTED:  # by us, in words for people
        return f"{what}: {cause.message}"
    return f"{what}: {cause.type}({cause.message!r:.{SHOWN_CHARACTERS}})"


def _words(trajectory: Trajectory) -> str:
    cause = trajectory.cause
    return trajectory.reason if cause is None else f"{cause.type}: {cause.message}"
