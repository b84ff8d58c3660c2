"""What stands out in a run's replicas."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rollout.observe.report.finding import NOTABLE, SEVERE, Finding, Run, percent
from rollout.plurals import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rollout.observe.report.series import ReplicaFigures

#: Losses of one replica that make it a flapping one.
FLAPPING = 2
#: A replica is starved that has so little of what the others have, while they have at least so many
#: requests at once on average, and got so many trajectories. Requests would say less: those of a
#: trajectory stay together, so that of few trajectories a replica may get none by chance.
STARVED_SHARE, OTHERS_AT_ONCE, TRAJECTORIES_EACH = 0.25, 1.0, 4
#: A replica is slow that decodes a request at so little of the others' pace, over so many requests.
SLOW_PACE, LEAST_REQUESTS = 0.4, 4
#: Engines are idle that have a request for so little of a run of at least so many seconds.
IDLE_SHARE, IDLE_RUN_S = 0.25, 2.0


def flapping(run: Run) -> Iterable[Finding]:
    """Replicas that were lost, and how often."""
    for replica in run.replicas:
        if not replica.losses:
            continue
        why = run.times.losses_of(replica.name)[-1]
        lost = [each for each in run.times.replicas[replica.name].requests if _is_lost(each)]
        resumed = sum(row.resumes for row in run.rows)
        is_flapping = replica.losses >= FLAPPING
        what = "flaps: it was lost" if is_flapping else "was lost"
        yield Finding(
            kind="flapping_replica" if is_flapping else "lost_replica",
            severity=SEVERE if is_flapping else NOTABLE,
            title=f"Replica {replica.name} {what} {count(replica.losses, 'time')}",
            text=(
                f"{count(len(lost), 'request')} of {replica.requests:,} ended with it, and "
                f"{resumed:,} resumed elsewhere in the run."
                + (f" The last time: {why.rstrip('.')}." if why else "")
            ),
            filter=f'replica:"{replica.name}" resumes>0' if resumed else "",
        )


def _is_lost(request: object) -> bool:
    return getattr(request, "finish_reason", "") == "lost"


def starved(run: Run) -> Iterable[Finding]:
    """Replicas that have next to nothing to do while others have."""
    replicas = [each for each in run.replicas if each.requests or _serves(run, each)]
    requests = sum(each.requests for each in replicas)
    placed = {each.name: _trajectories(run, each) for each in replicas}
    for replica in replicas if len(replicas) > 1 else ():
        others = [each for each in replicas if each is not replica]
        usual = median(each.at_once or 0.0 for each in others)
        usual_requests = median(each.requests for each in others)
        usual_placed = median(placed[each.name] for each in others)
        if (
            usual < OTHERS_AT_ONCE
            or usual_placed < TRAJECTORIES_EACH
            or replica.losses
            or (replica.at_once or 0.0) > STARVED_SHARE * usual
            or placed[replica.name] > STARVED_SHARE * usual_placed
        ):
            continue
        waited = max(each.queue or 0.0 for each in others)
        waits = f", where one waits {waited:.2f} s in the queue" if waited >= 0.1 else ""
        yield Finding(
            kind="starved_replica",
            severity=SEVERE,
            title=(
                f"Replica {replica.name} is starved: it has {replica.at_once or 0.0:.1f} requests "
                f"at once, others have {usual:.1f}"
            ),
            text=(
                f"It was busy for {percent(replica.busy or 0.0, 1)} of the run and served "
                f"{replica.requests:,} of {count(requests, 'request')}; each of the others about "
                f"{usual_requests:,.0f}{waits}."
            ),
            filter=f'replica:"{replica.name}"' if replica.requests else "",
        )


def _trajectories(run: Run, replica: ReplicaFigures) -> int:
    """How many it worked for; a conversation that was opened from another counts as one."""
    return len({each.session for each in run.times.replicas[replica.name].requests})


def _serves(run: Run, replica: ReplicaFigures) -> bool:
    return run.times.replicas[replica.name].serves_from is not None


def slow_replica(run: Run) -> Iterable[Finding]:
    """Replicas that take longer for the same."""
    paced = [each for each in run.replicas if each.pace and each.requests >= LEAST_REQUESTS]
    for replica in paced:
        others = [each.pace or 0.0 for each in paced if each is not replica]
        if not others or replica.pace is None or replica.pace > SLOW_PACE * median(others):
            continue
        yield Finding(
            kind="slow_replica",
            severity=SEVERE,
            title=(
                f"Replica {replica.name} is slow: {replica.pace:,.0f} tokens a second for a "
                f"request, others {median(others):,.0f}"
            ),
            text=(
                f"It served {count(replica.requests, 'request')} with "
                f"{replica.at_once or 0.0:.1f} at once; compare its hardware, its load and its "
                f"KV cache with those of the others."
            ),
            filter=f'replica:"{replica.name}"',
        )


def idle(run: Run) -> Iterable[Finding]:
    """Engines that wait for work most of the time, all of them."""
    if run.times.duration < IDLE_RUN_S or not run.replicas:
        return
    busy = [each.busy or 0.0 for each in run.replicas]
    if max(busy) >= IDLE_SHARE:
        return
    yield Finding(
        kind="idle_engines",
        severity=NOTABLE,
        title=f"Engines had nothing to do for {percent(1 - _mean(busy), 1)} of the run",
        text=(
            "Trajectories waited for something else: see where their time went. More of them at "
            "once (scheduling.max_in_flight) would use the engines meanwhile."
        ),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
