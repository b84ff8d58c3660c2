"""Which events of a file are those of one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.observe import events as told

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from rollout.observe.events import AnyEvent

#: What of an ended trajectory events and rows have in common: uid, member, outcome and num_turns.
Ended = tuple[str, int, str, int]


def of_batch(
    events: Iterable[AnyEvent], batch: int | None, rows: Collection[Ended]
) -> Iterator[AnyEvent]:
    """The events of one call: of its trajectories, and of the rest of its run meanwhile.

    Args:
        events: Of one run, or of several that were written after each other.
        batch: The call's number in its run; None: not known.
        rows: Of its trajectories; it is the call that has most of them, the latest of such.
    """
    found: tuple[int, int, list[AnyEvent]] = (-1, 0, [])
    for run in _runs(events):
        for number, ended in _calls(run).items():
            if batch in (None, number):
                found = max((len(ended.intersection(rows)), number, run), found, key=_shared)
    _, number, run = found
    mine = {
        each.trajectory
        for each in run
        if isinstance(each, told.TrajectoryStarted | told.TrajectoryEnded) and each.batch == number
    }
    times = [
        each.at
        for each in run
        if isinstance(each, told.BatchStarted | told.BatchEnded) and each.batch == number
    ]
    mine |= _ended_before(run, mine, rows, max(times, default=0.0))
    for event in run:
        if isinstance(event, told.TrajectoryEvent):
            is_wanted = event.trajectory in mine
        elif isinstance(event, told.BatchStarted | told.BatchEnded | told.GroupEnded):
            is_wanted = event.batch == number
        elif isinstance(event, told.RunStarted | told.ReplicaChanged):
            is_wanted = True
        else:
            is_wanted = bool(times) and min(times) <= event.at <= max(times)
        if is_wanted:
            yield event


def _ended_before(
    run: Iterable[AnyEvent], mine: Collection[int], rows: Collection[Ended], until: float
) -> set[int]:
    """Trajectories of its rows that had ended in an earlier call, which left their group to it."""
    ended = [each for each in run if isinstance(each, told.TrajectoryEnded) and each.at <= until]
    own = {_facts_of(each) for each in ended if each.trajectory in mine}
    left = {_facts_of(each): each.trajectory for each in ended if _facts_of(each) in rows}
    return {trajectory for facts, trajectory in left.items() if facts not in own}


def _facts_of(event: told.TrajectoryEnded) -> Ended:
    return event.uid, event.member, event.outcome, event.num_turns


def _shared(found: tuple[int, int, list[AnyEvent]]) -> int:
    return found[0]


def _runs(events: Iterable[AnyEvent]) -> list[list[AnyEvent]]:
    runs: list[list[AnyEvent]] = [[]]
    for event in events:
        if isinstance(event, told.RunStarted):
            runs.append([])
        runs[-1].append(event)
    return runs


def _calls(run: Iterable[AnyEvent]) -> dict[int, set[Ended]]:
    """What ended in each call of a run."""
    calls: dict[int, set[Ended]] = {}
    for each in run:
        if isinstance(each, told.BatchStarted):
            calls.setdefault(each.batch, set())
        elif isinstance(each, told.TrajectoryEnded):
            calls.setdefault(each.batch, set()).add(_facts_of(each))
    return calls
