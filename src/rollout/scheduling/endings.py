"""How members end: without a reward, unstarted; and what a call says of those that failed."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs

from rollout.agents.ending import Ending
from rollout.agents.trajectory_state import UNRESPONSIVE
from rollout.chat.trajectory import Trajectory
from rollout.errors import LimitExceeded
from rollout.plurals import count
from rollout.scheduling.rewards.functions import GROUP, SINGLE
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.config import SchedulingConfig
    from rollout.limits import Deadline
    from rollout.observe.tally import Tally
    from rollout.scheduling.members import Member

logger = logging.getLogger("rollout.scheduling")

#: Reason of trajectories that were cancelled because the runtime was closed.
CLOSED = "closed"
#: Reason of members that nobody wants any more.
SURPLUS = "surplus"
#: Reason of members that nobody takes, because the call itself was cancelled.
LOST = "call"
#: Reason of a failure by an agent that returned without one generated token.
NEVER_GENERATED = "never_generated"
#: Turns of models that were offered tools and called none, from which on that says something.
SILENT_TURNS = 4
#: Causes of failures that are logged, or listed in an error; the others are counted.
LISTED_CAUSES = 5
#: Characters of an error's message in a line of the log; the trajectory's `cause` has all of it.
SHOWN_CHARACTERS = 400

#: Outcome, reason, and the message of an error.
_Cause = tuple[Outcome, str, str]


def exclude(trajectory: Trajectory) -> None:
    """Mark a trajectory as not trainable, without a reward."""
    trajectory.trainable, trajectory.reward = False, None
    for segment in trajectory.segments:
        segment.reward = segment.token_rewards = None


def end_without_reward(trajectory: Trajectory, ending: Ending) -> None:
    """End a trajectory whose reward is unknown: it keeps its tokens, untrained."""
    trajectory.outcome, trajectory.reason = ending.outcome, ending.reason
    trajectory.limit_source, trajectory.cause = ending.limit_source, ending.cause
    exclude(trajectory)


def explain_cut(member: Member, deadline: Deadline) -> Ending:
    """Say how a member was ended from outside: it was cancelled, or else met this deadline."""
    if member.cancel_reason is not None:
        return Ending(outcome=Outcome.CANCELLED, reason=member.cancel_reason)
    error = deadline.error()
    return Ending(outcome=error.outcome, reason=error.reason, limit_source=error.source)


def make_trajectory(member: Member, ending: Ending, **fields: Any) -> Trajectory:
    """Make the trajectory of a member that ended so; `fields` are what it has beside that."""
    return Trajectory(
        uid=member.identity.uid,
        group=member.identity.group,
        member=member.identity.member,
        prompt=member.prompt,
        **attrs.asdict(ending, recurse=False),
        **fields,
    )


def make_unstarted(member: Member, ending: Ending) -> Trajectory:
    """Make the trajectory of a member whose agent never ran: an outcome and no tokens."""
    return make_trajectory(member, ending, trainable=False, extra=dict(member.prompt.extra))


class BadEndings:
    """Failed and rejected trajectories of one call, by cause.

    Args:
        tally: Of the runtime, which knows what was logged before.
        count: Members of the call; None: as many as have ended and count.
    """

    def __init__(self, tally: Tally, config: SchedulingConfig, count: int | None = None) -> None:
        self._tally, self._config, self._members = tally, config, count
        self._ended = 0
        #: How many failed, by cause, of those that count for `scheduling.max_failures`.
        self._failures: Counter[str] = Counter()
        self._counts: Counter[_Cause] = Counter()
        #: Of each cause, what the first trajectory says.
        self._first: dict[_Cause, str] = {}

    def add(self, trajectory: Trajectory, *, is_wanted: bool = True, is_new: bool = True) -> None:
        """Count one that has ended, if it failed or was rejected.

        Args:
            is_wanted: Whether it counts for `scheduling.max_failures`: it is no surplus.
            is_new: Whether it was not counted before; else it has failed since.
        """
        outcome = trajectory.outcome
        self._ended += is_wanted and is_new
        if outcome is Outcome.FAILED:
            key: _Cause = (outcome, trajectory.reason, describe_cause(trajectory))
            self._failures[key[2]] += is_wanted
        elif outcome is Outcome.REJECTED:
            key = (outcome, trajectory.reason, "")  # one line for each reason
        else:
            return
        self._counts[key] += 1
        if key not in self._first:
            self._first[key] = describe_ending(trajectory)
            if len(self._first) <= LISTED_CAUSES:
                logger.info("%s; others of this cause are counted", self._first[key])

    @property
    def are_too_many(self) -> bool:
        """Whether more have failed than `scheduling.max_failures` allows."""
        failed, most = self._failures.total(), self._config.max_failures
        share = self._config.max_failure_share
        return (
            most is not None and failed > most and failed > share * (self._members or self._ended)
        )

    def make_error(self) -> LimitExceeded:
        """The error of a call of which too many have failed."""
        causes, config = self._failures, self._config
        listed = causes.most_common(LISTED_CAUSES)
        lines = [f"\n  {times} × {cause}" for cause, times in listed]
        if len(causes) > len(listed):
            lines.append(f"\n  and {len(causes) - len(listed)} further causes")
        return LimitExceeded(
            f"{causes.total()} of {self._members or self._ended} trajectories failed "
            f"(scheduling.max_failures = {config.max_failures}, scheduling."
            f"max_failure_share = {config.max_failure_share:g}); the batch stopped:"
            f"{''.join(lines)}",
            source="scheduling.max_failures",
            reason="failures",
            outcome=Outcome.FAILED,
        )

    def log(self) -> None:
        """Log a line for each reason of rejections, and for each frequent cause of failures.

        And what else would pass in silence, once in the runtime.
        """
        _hint_at_tools(self._tally)
        listed, rest = 0, Counter[_Cause]()
        for key, number in self._counts.most_common():
            outcome, reason, cause = key
            if reason == NEVER_GENERATED:  # it says what agents do, and is no other's failure
                self._tally.hint(
                    cause,
                    f"{self._first[key]}. So ended {number:,} of "
                    f"{count(self._ended, 'trajectory')}; nothing is learned from them. An agent "
                    f"has the model generate by `await context.generate()`, or by requests to its "
                    f"task's `base_url` with its `api_key`.",
                )
            elif outcome is Outcome.FAILED and reason != UNRESPONSIVE and listed == LISTED_CAUSES:
                rest[key] = number
            else:  # each that is unresponsive is named
                listed += outcome is Outcome.FAILED
                logger.warning("%s (%s)", self._first[key], count(number, "trajectory"))
        if rest:
            causes = count(len(rest), "further cause")
            logger.warning("%s failed of %s", count(rest.total(), "trajectory"), causes)


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
    if first.outcome is Outcome.FAILED and first.reason == SINGLE:
        what = f"reward of {first.uid} failed"
    elif first.outcome is Outcome.FAILED and first.reason == GROUP:
        what = f"group reward of {first.uid} failed"
    else:
        what = f"{first.uid}/{first.member} {first.outcome} ({first.reason})"
    cause = first.cause
    if cause is None:
        return what
    if first.outcome is Outcome.REJECTED:  # by us, in words for people
        return f"{what}: {cause.message}"
    return f"{what}: {cause.type}({cause.message!r:.{SHOWN_CHARACTERS}})"


def describe_cause(ended: Trajectory | Ending) -> str:
    """Say what something failed of."""
    return ended.reason if ended.cause is None else f"{ended.cause.type}: {ended.cause.message}"
