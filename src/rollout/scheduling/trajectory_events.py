"""What scheduling tells of trajectories, groups and rewards, while somebody reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.observe.event_stream import NO_TRAJECTORY
from rollout.observe.events import GroupEnded, RewardEnded, TrajectoryEnded, TrajectoryStarted
from rollout.types import DRIFT, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.observe.event_stream import EventStream
    from rollout.scheduling.member_group import Ended, Member


def emit_started(events: EventStream, member: Member, attempt: int, started: float) -> None:
    """An attempt begins, the first one when `started`; the member has its number from now on."""
    if attempt == 1:
        _number(events, member)
        member.began = started
        events.begin(member.identity.number)
    event = TrajectoryStarted(at=events.now(), **_named(member), attempt=attempt)
    events.tell_event(member.identity.number, event)


def emit_ended(events: EventStream, member: Member, trajectory: Trajectory) -> None:
    """A member has its outcome; emitted where a reader wants that."""
    who, is_failed = member.identity, trajectory.outcome is Outcome.FAILED
    if not events.tell_notes(who.number, who.step, who.uid, who.member, is_failed=is_failed):
        return
    if member.began is None:
        _number(events, member)
    now, metrics, rows = events.now(), trajectory.metrics, tuple(trajectory.transcripts)
    cause, drifts = trajectory.cause, [name for name in metrics if name.startswith(DRIFT)]
    generated = sum(each.generated_length for each in rows)
    versions = set[int]().union(*(each.versions for each in rows))
    events.emit(
        TrajectoryEnded(
            at=now,
            **_named(member),
            began=now if member.began is None else events.since_start(member.began),
            outcome=trajectory.outcome.value,
            reason=trajectory.reason,
            limit_source=trajectory.limit_source or "",
            cause="" if cause is None else f"{cause.type}: {cause.message}",
            trainable=trajectory.trainable,
            reward=trajectory.reward,
            turns=sum(each.turns for each in rows),
            num_turns=trajectory.num_turns,
            rows=len(trajectory.segments),
            prompt_tokens=sum(each.prompt_length for each in rows),
            generated_tokens=generated,
            observation_tokens=sum(each.response_length for each in rows) - generated,
            generation_s=metrics.get("generation_s", 0.0),
            tool_s=metrics.get("tool_s", 0.0),
            tool_calls=int(metrics.get("tool_calls", 0)),
            tool_errors=int(metrics.get("tool_errors", 0)),
            discarded_tokens=int(metrics.get("discarded_tokens", 0)),
            resumes=int(metrics.get("resumes", 0)),
            restarts=int(metrics.get("restarts", 0)),
            drift=drifts[0].removeprefix(DRIFT) if drifts else "",
            versions=(min(versions), max(versions)) if versions else (),
        ),
        trajectory,
    )


def emit_group_ended(events: EventStream, ended: Sequence[Ended], verdict: str = "") -> None:
    """All members of a group have ended; in member order."""
    if not (ended and events.is_on):
        return
    first = ended[0].member
    began = [each.member.began for each in ended if each.member.began is not None]
    now = events.now()
    events.emit(
        GroupEnded(
            at=now,
            batch=first.batch,
            group=first.identity.group,
            uid=first.identity.uid,
            began=events.since_start(min(began)) if began else now,
            rewards=tuple(each.trajectory.reward for each in ended),
            outcomes=tuple(each.trajectory.outcome.value for each in ended),
            verdict=verdict,
        )
    )


def emit_rewarded(
    events: EventStream,
    member: Member,
    began: float,
    reward: float | None,
    error: str = "",
    *,
    is_group: bool = False,
) -> None:
    """A reward function has answered for a member, or for the group that it is the first of."""
    event = RewardEnded(
        at=events.now(),
        trajectory=NO_TRAJECTORY if is_group else member.identity.number,
        batch=member.batch,
        group=member.identity.group,
        began=events.since_start(began),
        reward=reward,
        error=error,
    )
    events.tell_event(event.trajectory, event)


def _named(member: Member) -> dict[str, Any]:
    """The fields by which events name a trajectory."""
    identity = member.identity
    return {
        "trajectory": identity.number,
        "batch": member.batch,
        "step": identity.step,
        "uid": identity.uid,
        "group": identity.group,
        "member": identity.member,
        "validate": identity.validate,
    }


def _number(events: EventStream, member: Member) -> None:
    number = events.new_trajectory()
    member.identity = msgspec.structs.replace(member.identity, number=number)
