"""How the trajectories of a call ended that did not go well: counted, and logged once a cause."""

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

logger = logging.getLogger("rollout.scheduling")

#: Causes of failures that are logged, or listed in an error; the others are counted.
LISTED_CAUSES = 5
#: Of what an error said, in a line of the log; the trajectory's `cause` has all of it.
SHOWN_CHARACTERS = 400

#: Outcome, reason, and what an error said.
_Cause = tuple[Outcome, str, str]


class BadEndings:
    """Failed and rejected trajectories of one call, by cause.

    Attributes:
        failures: How many failed, by what was raised, of those that are held against the budget.
    """

    def __init__(self) -> None:
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
            is_free: Whether it is logged, and costs no budget: nobody wants it any more, or it is
                started again.
        """
        outcome = trajectory.outcome
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
        """One line for each reason of rejections, and for each frequent cause of failures."""
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
