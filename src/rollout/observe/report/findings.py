"""What stands out in a run, in words, with the number that shows it.

What causes others comes first: a blocked loop makes every tool look slow, a lost replica starves.
A run in which nothing stands out has no findings; the thresholds are written beside each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout.observe.report.engine_findings import failing, flapping, idle, slow_replica, starved
from rollout.observe.report.finding import NOTABLE, SEVERE, Finding, Run, listed, percent
from rollout.observe.report.tool_findings import erring_tools, slow_tools
from rollout.plurals import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rollout.observe.events import LoopBlocked

#: Of trajectories that were compared: drift that a template is by design is not counted.
DRIFTING, BY_DESIGN = 0.02, ("identical", "none", "reasoning_stripped")
#: Code blocked the loop for so many seconds and so much of the run altogether, or so long at once.
#: What is measured of 0.3 s may be less by some hundredths.
BLOCKED_S, BLOCKED_SHARE, BLOCKED_AT_ONCE_S = 0.2, 0.02, 0.5
#: Less of it in the time of calls is none: the trainer's own, or what a call begins with.
LEAST_BLOCKED_S = 0.1
#: As much of what is no single piece of code's, such as Python's collection of garbage.
BLOCKED_BY_ALL_S, BLOCKED_BY_ALL_SHARE = 1.0, 0.1
#: How errors of calls begin that somebody stopped.
STOPPED = ("Cancelled", "KeyboardInterrupt", "SystemExit", "GeneratorExit")
#: How a cause names the place of code.
PLACE = " at "
#: Of all trajectories.
FAILED_SHARE, CUT_SHARE, MAJORITY, LATE_SHARE = 0.02, 0.3, 0.5, 0.1
#: Of the groups with two known rewards or more, of which there must be some; of few most must be.
EQUAL_SHARE, MOST_EQUAL_SHARE, LEAST_GROUPS = 0.5, 0.75, 2
FEW_GROUPS, FEW_EQUAL_SHARE = 6, 0.8


def findings_of(run: Run) -> list[Finding]:
    """What stands out, the worst first."""
    found = [finding for look in _LOOKS for finding in look(run)]
    if not run.rows:  # there is no table that could be filtered
        found = [msgspec.structs.replace(each, filter="") for each in found]
    return sorted(found, key=lambda each: each.severity != SEVERE)


def looked_for(run: Run) -> str:
    """What is said where nothing was found."""
    if not run.endings:
        return "No trajectory has ended so far."
    if not run.times.is_known:
        return (
            "Nothing stands out in outcomes, lengths, rewards and tokens. No events were recorded, "
            "so that single tools, replicas and the event loop could not be looked at."
        )
    return (
        "Nothing stands out: no tool or replica is slow, starved or lost, the event loop was not "
        f"blocked, {_agreement(run)}, and lengths, failures and the rewards within groups are as "
        "they should be."
    )


def _agreement(run: Run) -> str:
    compared = [row for row in run.endings if row.drift]
    agree = sum(row.drift in BY_DESIGN for row in compared)
    if not compared:
        return "texts and tokens were not compared (agent.tokenization_check)"
    if agree == len(run.endings):
        return "texts and tokens agree"
    some = "all" if agree == len(compared) else f"{agree:,} of"
    return (
        f"texts and tokens agree in {some} {len(compared):,} trajectories that were compared, of "
        f"{len(run.endings):,}"
    )


def _drift(run: Run) -> Iterable[Finding]:
    compared = [row for row in run.endings if row.drift or row.reason == "tokenization"]
    kinds = Counter(row.drift or "refused" for row in compared if row.drift not in BY_DESIGN)
    drifting = sum(kinds.values())
    if not compared or drifting / len(compared) < DRIFTING:
        return
    of_all = f"{percent(drifting, len(compared))} of trajectories"
    of_some = f"{drifting:,} of {count(len(compared), 'trajectory')} that were compared"
    worst = ", ".join(f"{number} in {_drift_name(kind)}" for kind, number in kinds.most_common())
    yield Finding(
        kind="drift",
        severity=SEVERE,
        title=(
            "Text and tokens drift apart in "
            f"{of_all if len(compared) == len(run.endings) else of_some}"
        ),
        text=(
            f"Of {len(compared):,} trajectories that were compared with a full rendering of their "
            f"conversation, {drifting:,} differ: {worst}. The chat template writes a conversation "
            f"otherwise as a whole than turn by turn; `rollout check-template` shows where."
        ),
        filter="drift=" + "|".join(kinds) if "refused" not in kinds else "reason=tokenization",
    )


def _drift_name(kind: str) -> str:
    return {"whitespace": "white space", "refused": "that the template refuses it"}.get(
        kind, kind.replace("_", " ")
    )


def _blocked_loop(run: Run) -> Iterable[Finding]:
    events = _blocks(run)
    if not _is_blocked(events, run.times.duration):
        return
    total, longest = sum(each.seconds for each in events), max(each.seconds for each in events)
    by_cause: dict[str, float] = defaultdict(float)
    for each in events:
        by_cause[each.cause.rpartition(PLACE)[2]] += each.seconds
    cause = max(by_cause, key=lambda each: by_cause[each])
    yield Finding(
        kind="blocked_loop",
        severity=SEVERE,
        title=f"The event loop was blocked for {total:.1f} s",
        text=(
            f"{count(len(events), 'time')} something kept the event loop for longer than 0.1 s, "
            f"{longest:.2f} s at the longest, {percent(total, run.times.duration)} of the run; no "
            f"trajectory and no engine is served meanwhile. Most of it: {cause or 'not known'}."
        ),
    )


def _blocks(run: Run) -> list[LoopBlocked]:
    """Those parts of them in which something was asked: a trainer may block the loop between."""
    found = [each for each in run.times.blocked if not each.is_starved]
    ends = np.array([each.at for each in found])
    lengths = np.array([each.seconds for each in found])
    open_s = run.times.calls.open_before(ends) - run.times.calls.open_before(ends - lengths)
    return [
        msgspec.structs.replace(each, seconds=seconds)
        for each, seconds in zip(found, open_s.tolist(), strict=True)
        if seconds >= LEAST_BLOCKED_S
    ]


def _is_blocked(events: Sequence[LoopBlocked], duration: float) -> bool:
    by_code = [each.seconds for each in events if PLACE in each.cause]
    return (
        max(by_code, default=0.0) >= BLOCKED_AT_ONCE_S
        or sum(by_code) >= max(BLOCKED_S, BLOCKED_SHARE * duration)
        or sum(each.seconds for each in events)
        >= max(BLOCKED_BY_ALL_S, BLOCKED_BY_ALL_SHARE * duration)
    )


def _failed_calls(run: Run) -> Iterable[Finding]:
    errors = [each for each in run.times.errors if not each.error.startswith(STOPPED)]
    if not errors:
        return
    calls = {each.batch: f"{each.call}() of step {each.step}" for each in run.times.batches}
    first = {each.error: calls.get(each.batch, "a call") for each in reversed(errors)}
    raised = Counter(f"{first[each.error]} raised {each.error}" for each in errors)
    yield Finding(
        kind="failed_calls",
        severity=SEVERE,
        title=f"{count(len(errors), 'call')} of {len(run.times.batches):,} ended with an error",
        text=f"What each raised, and which call first:{listed(raised)}",
    )


def _failures(run: Run) -> Iterable[Finding]:
    ended = [row for row in run.endings if row.outcome in ("failed", "rejected")]
    failed = [row for row in ended if row.reason != "tokenization"]
    if not failed:
        return
    causes = Counter(
        f"{row.outcome} ({row.reason})" + (f": {row.cause}" if row.cause else "") for row in failed
    )
    share = percent(len(failed), len(run.endings))
    yield Finding(
        kind="failures",
        severity=SEVERE if len(failed) / len(run.endings) >= 5 * FAILED_SHARE else NOTABLE,
        title=f"{share} of trajectories failed or were rejected",
        text=(
            f"{len(failed):,} of {len(run.endings):,}. They have no reward, and nothing is learned "
            f"from them. Every cause:{listed(causes)}"
        ),
        filter="outcome:failed|rejected"
        + (" -reason=tokenization" if len(failed) < len(ended) else ""),
    )


def _cut_by_length(run: Run) -> Iterable[Finding]:
    cut = [row for row in run.endings if row.outcome == "length"]
    if not cut or len(cut) / len(run.endings) < CUT_SHARE:
        return
    is_most = len(cut) / len(run.endings) >= MAJORITY
    limits = Counter(row.limit for row in cut if row.limit)
    where = f" Most often by {limits.most_common(1)[0][0]}." if limits else ""
    sampled = sorted(row.generated for row in cut)[len(cut) // 2]
    share = percent(len(cut), len(run.endings))
    yield Finding(
        kind="truncated",
        severity=SEVERE if is_most else NOTABLE,
        title=f"{'A majority' if is_most else 'Many'} of trajectories ({share}) were cut by length",
        text=(
            f"{len(cut):,} of {len(run.endings):,} had no room left before they ended by "
            f"themselves, after {sampled:,} sampled tokens in the middle.{where} What they would "
            f"have answered is not known, and their rewards say little."
        ),
        filter="outcome:length",
    )


def _cut_by_time(run: Run) -> Iterable[Finding]:
    late = [row for row in run.endings if row.outcome == "deadline"]
    if not late or len(late) / len(run.endings) < LATE_SHARE:
        return
    limits = Counter(row.limit for row in late)
    share = percent(len(late), len(run.endings))
    yield Finding(
        kind="late",
        severity=NOTABLE,
        title=f"{share} of trajectories ran out of time",
        text=(
            f"{len(late):,} of {len(run.endings):,}, most by "
            f"{limits.most_common(1)[0][0] or 'time'}."
        ),
        filter="outcome:deadline",
    )


def _no_signal(run: Run) -> Iterable[Finding]:
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in run.endings:
        if row.reward is not None:
            groups[row.group_key].append(row.reward)
    known = [rewards for rewards in groups.values() if len(rewards) > 1]
    equal = [rewards for rewards in known if min(rewards) == max(rewards)]
    least = EQUAL_SHARE if len(known) >= FEW_GROUPS else FEW_EQUAL_SHARE
    if len(known) < LEAST_GROUPS or len(equal) / len(known) < least:
        return
    is_most = len(equal) / len(known) >= MOST_EQUAL_SHARE
    values = Counter(rewards[0] for rewards in equal).most_common(1)[0]
    share = percent(len(equal), len(known))
    yield Finding(
        kind="no_signal",
        severity=SEVERE if is_most else NOTABLE,
        title=f"{share} of groups give no signal: all members have the same reward",
        text=(
            f"{len(equal):,} of {count(len(known), 'group')}; {values[1]:,} of them have only "
            f"{values[0]:g}. Advantages within such a group are zero: prompts that are neither "
            f"always solved nor never would teach more."
        ),
    )


_LOOKS: Sequence[Callable[[Run], Iterable[Finding]]] = (
    flapping,
    _drift,
    _blocked_loop,
    slow_tools,
    failing,
    starved,
    slow_replica,
    _failed_calls,
    _failures,
    _cut_by_length,
    _cut_by_time,
    _no_signal,
    erring_tools,
    idle,
)
