"""What a runtime's trajectories wait for now: looked up when a caller asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.agents.trajectory_state import USER
from rollout.engine.pool.replica import find_missing
from rollout.observe.explanation import CallWaits, Explanation, TrajectoryWaits, Wait
from rollout.scheduling.rewards.score import RewardCall
from rollout.scheduling.trajectory import TrajectoryRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from rollout.engine.pool.pool import EnginePool
    from rollout.engine.pool.replica import ReplicaStatistics
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.scheduling.calls import Call
    from rollout.scheduling.members import Member


def explain(
    engines: EnginePool,
    now: float,
    open_calls: Iterable[Call],
    carried: Iterable[Member],
    blocked_s: float,
) -> Explanation:
    """What each trajectory that has not ended waits for, and since when.

    Args:
        engines: Of the runtime.
        now: The loop's time.
        open_calls: Those that run.
        carried: Members that no call has.
        blocked_s: How long something has been blocking the loop.
    """
    requests = engines.waits(now)
    calls = [
        CallWaits(
            name=call.name,
            step=call.step,
            seconds=now - call.began,
            groups=call.groups.wanted or 0,
            trajectories=tuple(
                _member_waits(member, requests, now, call.began, waits_for_group=is_waiting)
                for member, is_waiting in call.list_unfinished().items()
            ),
            waiting=call.groups.waits_for,
        )
        for call in open_calls
    ]
    held = [_member_waits(member, requests, now, None) for member in carried]
    replicas = engines.statistics()
    lines = tuple(map(_describe_replica, replicas))
    return Explanation(tuple(calls), tuple(held), lines, blocked_s, find_missing(replicas))


def _member_waits(
    member: Member,
    requests: Mapping[str, list[Wait]],
    now: float,
    began: float | None,
    *,
    waits_for_group: bool = False,
) -> TrajectoryWaits:
    """Of a member; `began`: of the call that has it, None where none does."""
    identity, scope, since = member.identity, member.running, member.concluding_since
    started: float | None = None
    waits: list[Wait] = []
    sandbox: TrajectorySandbox | None = None
    if isinstance(scope, TrajectoryRun):
        started = scope.started
        asked = sorted(requests.get(identity.session_id, ()), key=lambda wait: wait.path)
        waits += [*asked, *_agent_waits(scope, now)]
        sandbox = scope.context.state.used_sandbox
        waits = waits or [_own_code_wait(scope, now)]
        if began is not None and all(wait.kind == "held" for wait in waits):
            started, waits = None, [Wait("place", now - began)]  # it continues once it has one
    elif isinstance(scope, RewardCall):
        name = " of its group" if scope.is_group else ""
        waits.append(Wait("reward", now - scope.since, name))
    elif waits_for_group and since is not None:
        waits.append(Wait("group", now - since))
    elif since is not None:
        waits.append(Wait("end", now - since))
    else:
        waits.append(Wait("place", 0.0 if began is None else now - began))
    return TrajectoryWaits(
        uid=identity.uid,
        group=identity.group,
        member=identity.member,
        seconds=None if started is None else now - started,
        waits=tuple(waits),
        sandbox=sandbox.id if sandbox is not None and sandbox.is_open else "",
    )


def _agent_waits(run: TrajectoryRun, now: float) -> Iterator[Wait]:
    """What it waits for beside engines."""
    sandbox = run.context.state.used_sandbox
    if sandbox is not None and sandbox.opens_since is not None:
        yield Wait("sandbox", now - sandbox.opens_since)
    tools = run.context.state.used_tools
    calls = () if tools is None else tuple(tools.running)
    for call in calls:
        yield Wait("tool", now - call.began, repr(call.tool))
    for code in run.code.inner:
        if code.what == USER:
            yield Wait("user", now - code.since)
        elif not (calls and code.what.startswith("tool ")):
            yield Wait("code", now - code.since, code.what)


def _own_code_wait(run: TrajectoryRun, now: float) -> Wait:
    since = max(run.started, run.context.state.find_idle_since())
    place = run.code.place()
    return Wait("code", now - since, run.code.what, note=f"at {place}" if place else "")


def _describe_replica(replica: ReplicaStatistics) -> str:
    zombies = f", {replica.zombies:,} cancelled ones among them" if replica.zombies else ""
    starts = f", started {replica.starts} times" if replica.starts > 1 else ""
    state = f"{replica.name}: {replica.state}, {replica.in_flight:,} in flight{zombies}{starts}"
    return f"{state}; last error: {replica.last_error}" if replica.last_error else state
