"""What stands out in a run's replicas."""

from __future__ import annotations

from collections import Counter
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from rollout.observe.report.finding import NOTABLE, SEVERE, Finding, Run, percent, quoted
from rollout.plurals import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rollout.observe.events import RequestEnded
    from rollout.observe.report.series import ReplicaFigures

#: Losses of one replica that make it a flapping one.
FLAPPING = 2
#: A replica is starved that has so little of what the others have on average, while that are at
#: least so many requests at once, and so many trajectories. Requests would say less: those of a
#: trajectory stay together, so that of few trajectories a replica may get none by chance. A median
#: would say nothing where one replica has all and most are starved.
STARVED_SHARE, OTHERS_AT_ONCE, TRAJECTORIES_EACH = 0.25, 1.0, 4
#: More starved replicas are said together, and so many of them named.
SAID_ONE_BY_ONE, NAMED = 2, 8
#: A replica fails that gives no token for so many of at least so many requests, and others for half
#: of that share at most. How such a request ends.
FAILING_SHARE, FAILING_REQUESTS, REFUSED = 0.5, 4, ("rejected", "error")
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
        resumed = sum(row.resumes for row in run.endings)
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
            filter=f"replica:{quoted(replica.name)} resumes>0" if resumed else "",
        )


def _is_lost(request: object) -> bool:
    return getattr(request, "finish_reason", "") == "lost"


def failing(run: Run) -> Iterable[Finding]:
    """Replicas that answer requests without a token, as others do not."""
    refused = {each.name: _refused(run, each) for each in run.replicas}
    for replica in run.replicas:
        own, others = refused[replica.name], [each for each in run.replicas if each is not replica]
        asked = sum(each.requests for each in others)
        of_others = sum(len(refused[each.name]) for each in others)
        share = len(own) / replica.requests if replica.requests else 0.0
        if (
            replica.requests < FAILING_REQUESTS
            or share < FAILING_SHARE
            or not asked
            or of_others / asked > share / 2
        ):
            continue
        ends = Counter(each.finish_reason for each in own)
        how = ", ".join(f"{number:,} were {_REFUSALS[kind]}" for kind, number in ends.most_common())
        tokens = sum(each.tokens for each in others)
        yield Finding(
            kind="failing_replica",
            severity=SEVERE,
            title=(
                f"Replica {replica.name} gave no token for {len(own):,} of "
                f"{count(replica.requests, 'request')}"
            ),
            text=(
                f"{how[:1].upper()}{how[1:]}. It gave {count(replica.tokens, 'token')} in the run, "
                f"the others {tokens:,} for {count(asked, 'request')}. Each of these requests was "
                f"made again elsewhere, or failed; its log says why."
            ),
            filter=f"replica:{quoted(replica.name)}" if replica.tokens else "",
        )


_REFUSALS = {"rejected": "rejected", "error": "answered with an error"}


def _refused(run: Run, replica: ReplicaFigures) -> list[RequestEnded]:
    requests = run.times.replicas[replica.name].requests
    return [each for each in requests if not each.tokens and each.finish_reason in REFUSED]


class _Starved(NamedTuple):
    """A replica, and the others on average."""

    replica: ReplicaFigures
    others: Sequence[ReplicaFigures]

    @property
    def at_once(self) -> float:
        return self.replica.at_once or 0.0

    @property
    def usual(self) -> float:
        return fmean(each.at_once or 0.0 for each in self.others)


def starved(run: Run) -> Iterable[Finding]:
    """Replicas that have next to nothing to do while others have."""
    replicas = [each for each in run.replicas if each.requests or _serves(run, each)]
    placed = {each.name: _trajectories(run, each) for each in replicas}
    found = []
    for replica in replicas if len(replicas) > 1 else ():
        others = [each for each in replicas if each is not replica]
        compared = _Starved(replica, others)
        usual_placed = fmean(placed[each.name] for each in others)
        if (
            compared.usual >= OTHERS_AT_ONCE
            and usual_placed >= TRAJECTORIES_EACH
            and not replica.losses
            and compared.at_once <= STARVED_SHARE * compared.usual
            and placed[replica.name] <= STARVED_SHARE * usual_placed
        ):
            found.append(compared)
    if len(found) > SAID_ONE_BY_ONE:
        yield _several_starved([each.replica for each in found], replicas)
    else:
        yield from map(_starved, found)


def _starved(compared: _Starved) -> Finding:
    replica, others = compared
    requests = sum(each.requests for each in (replica, *others))
    return Finding(
        kind="starved_replica",
        severity=SEVERE,
        title=(
            f"Replica {replica.name} is starved: it has {compared.at_once:.1f} requests at once, "
            f"others have {compared.usual:.1f}"
        ),
        text=(
            f"It was busy for {percent(replica.busy or 0.0, 1)} of the run and served "
            f"{replica.requests:,} of {count(requests, 'request')}; each of the others about "
            f"{fmean(each.requests for each in others):,.0f}{_waits(others)}."
        ),
        filter=f"replica:{quoted(replica.name)}" if replica.requests else "",
    )


def _several_starved(
    starving: Sequence[ReplicaFigures], replicas: Sequence[ReplicaFigures]
) -> Finding:
    others = [each for each in replicas if each not in starving]
    own, usual = (fmean(each.at_once or 0.0 for each in some) for some in (starving, others))
    named = ", ".join(each.name for each in starving[:NAMED])
    more = f" and {len(starving) - NAMED:,} more" if len(starving) > NAMED else ""
    return Finding(
        kind="starved_replica",
        severity=SEVERE,
        title=(
            f"{len(starving):,} of {len(replicas):,} replicas are starved: each has {own:.1f} "
            f"requests at once, others have {usual:.1f}"
        ),
        text=(
            f"{named}{more} served {sum(each.requests for each in starving):,} of "
            f"{count(sum(each.requests for each in replicas), 'request')}; each of the others "
            f"about {fmean(each.requests for each in others):,.0f}{_waits(others)}."
        ),
    )


def _waits(others: Sequence[ReplicaFigures]) -> str:
    waited = max(each.queue or 0.0 for each in others)
    return f", where one waits {waited:.2f} s in the queue" if waited >= 0.1 else ""


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
            filter=f"replica:{quoted(replica.name)}",
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
        title=f"Engines had nothing to do for {percent(1 - fmean(busy), 1)} of the run",
        text=(
            "Trajectories waited for something else: see where their time went. More of them at "
            "once (scheduling.max_in_flight) would use the engines meanwhile."
        ),
    )
