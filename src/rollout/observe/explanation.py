"""What everything that has not ended waits for, and since when: a tree for people."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import attrs

from rollout.plurals import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: "place": one among the trajectories in flight; "queue": a place on a replica; "generation": a
#: replica's tokens; "held": the next call, which it is carried to; "sandbox": that its sandbox is
#: opened, with the wait for room; "tool", "user", "reward";
#: "group": the others of its group; "code": its agent's own; "end": what comes after its agent.
WaitKind = Literal[
    "place",
    "queue",
    "generation",
    "held",
    "sandbox",
    "tool",
    "user",
    "reward",
    "group",
    "code",
    "end",
]

_WORDS: dict[WaitKind, str] = {
    "place": "a place",
    "queue": "the engines' queue",
    "generation": "generation on {}",
    "held": "the next call",
    "sandbox": "its sandbox",
    "tool": "tool {}",
    "user": "its user",
    "reward": "reward{}",
    "group": "the others of its group",
    "code": "{}",
    "end": "its end{}",
}
#: Trajectories that wait for a place are told of together; so many names stand there.
NAMES = 3


@attrs.frozen
class Wait:
    """One thing that a trajectory waits for.

    Attributes:
        kind: What it is.
        seconds: For how long it has waited.
        name: The replica's, the tool's, or what else there is.
        note: What else is known.
        path: The conversation, where it is not the main one; see `Identity`.
    """

    kind: WaitKind
    seconds: float
    name: str = ""
    note: str = ""
    path: str = ""

    def __str__(self) -> str:
        what = _WORDS[self.kind].format(self.name)
        where = f" in conversation {self.path}" if self.path else ""
        note = f", {self.note}" if self.note else ""
        return f"{what}{where}, for {short_seconds(self.seconds)}{note}"


@attrs.frozen
class TrajectoryWaits:
    """One trajectory that has not ended.

    Attributes:
        uid, group, member: Which one it is.
        seconds: Since it got its place; None while it waits for that.
        waits: What it waits for, at least one thing.
        sandbox: The id of the one that it has open; "" where it has none.
    """

    uid: str
    group: int
    member: int
    seconds: float | None
    waits: tuple[Wait, ...]
    sandbox: str = ""

    @property
    def is_unstarted(self) -> bool:
        """Whether it has no place so far."""
        return self.waits[0].kind == "place"


@attrs.frozen
class CallWaits:
    """One call of a runtime that has not ended.

    Attributes:
        name: The method's.
        step: The trainer's.
        seconds: Since it was made.
        groups: Of its trajectories, all of them; 0 where it is not known.
        trajectories: Those of it that have not ended, in their order.
        waiting: What the call itself waits for, in words; "" where it is its trajectories.
    """

    name: str
    step: int
    seconds: float
    groups: int
    trajectories: tuple[TrajectoryWaits, ...]
    waiting: str = ""

    def lines(self) -> Iterator[str]:
        """A tree of its groups and their members."""
        rows = self.trajectories
        yield (
            f"{self.name}, step {self.step}, for {short_seconds(self.seconds)}: "
            f"{count(len(rows), 'trajectory')} not ended{_counted(rows)}"
        )
        if self.waiting:
            yield self.waiting
        groups: dict[tuple[int, str], list[TrajectoryWaits]] = {}
        for row in rows:
            if not row.is_unstarted:
                groups.setdefault((row.group, row.uid), []).append(row)
        unstarted = [row for row in rows if row.is_unstarted]
        branches = [_group_lines(uid, members) for (_, uid), members in groups.items()]
        if unstarted:
            branches.append(iter([_unstarted(unstarted)]))
        yield from _tree(branches)


@attrs.frozen
class Explanation:
    """What a runtime waits for now; ``str()`` of it is a tree.

    Attributes:
        calls: Those that have not ended.
        carried: Trajectories that wait for the next call.
        replicas: A line for each replica.
        blocked_s: For how long the event loop has not come round, where that is longer than 0.1 s.
        missing: Names of the replicas that do not serve.
    """

    calls: tuple[CallWaits, ...]
    carried: tuple[TrajectoryWaits, ...] = ()
    replicas: tuple[str, ...] = ()
    blocked_s: float = 0.0
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [line for call in self.calls for line in call.lines()]
        if self.carried:
            names = ", ".join(map(_carried, self.carried))
            lines.append(f"carried to the next call: {names}")
        if not lines:
            lines.append("nothing runs")
        if self.replicas:
            missing = f" without {', '.join(self.missing)}" if self.missing else ""
            lines += [f"engines{missing}", *_tree([iter([line]) for line in self.replicas])]
        return "\n".join(lines)


def _carried(row: TrajectoryWaits) -> str:
    return f"{row.uid}/{row.member}" + (f" with sandbox {row.sandbox}" if row.sandbox else "")


def _counted(rows: Sequence[TrajectoryWaits]) -> str:
    kinds = Counter(row.waits[0].kind for row in rows)
    told = [f"{number:,} {KINDS[kind]}" for kind, number in kinds.most_common()]
    return f" ({', '.join(told)})" if told else ""


#: How many trajectories do what, in words after their number.
KINDS: dict[WaitKind, str] = {
    "place": "without a place",
    "queue": "in the engines' queue",
    "generation": "generating",
    "held": "held",
    "sandbox": "waiting for their sandbox",
    "tool": "with tools",
    "user": "with users",
    "reward": "with rewards",
    "group": "waiting for their group",
    "code": "in their agent's code",
    "end": "ending",
}


def _group_lines(uid: str, members: Sequence[TrajectoryWaits]) -> Iterator[str]:
    yield uid
    yield from _tree([_member_lines(row) for row in members])


def _member_lines(row: TrajectoryWaits) -> Iterator[str]:
    head = f"member {row.member}"
    if row.seconds is not None:
        head += f", for {short_seconds(row.seconds)}"
    if len(row.waits) == 1:
        yield f"{head}: {row.waits[0]}"
        return
    yield head
    yield from _tree([iter([str(wait)]) for wait in row.waits])


def _unstarted(rows: Sequence[TrajectoryWaits]) -> str:
    names = [f"{row.uid}/{row.member}" for row in rows]
    if len(names) > NAMES + 1:
        names = [*names[:NAMES], f"… {names[-1]}"]
    return f"{len(rows):,} × {rows[0].waits[0]}: {', '.join(names)}"


def _tree(branches: Iterable[Iterator[str]]) -> Iterator[str]:
    """Branches below one another, each with its own lines below its first."""
    known = list(branches)
    for at, branch in enumerate(known):
        is_last = at == len(known) - 1
        for number, line in enumerate(branch):
            if number == 0:
                yield f"{'└─' if is_last else '├─'} {line}"
            else:
                yield f"{'   ' if is_last else '│  '}{line}"


def short_seconds(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 120:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
