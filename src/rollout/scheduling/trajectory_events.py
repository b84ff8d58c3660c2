"""What scheduling tells of trajectories and groups, while somebody reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.observe.events import GroupEnded, TrajectoryEnded, TrajectoryStarted
from rollout.types import DRIFT, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.chat.trajectory import Trajectory
    from rollout.observe.event_stream import EventStream
    from rollout.scheduling.members import Member


def emit_started(events: EventStream, member: Member, attempt: int, started: float) -> None:
    """An attempt begins, the first one when `started`; the member has its number from now on."""
    if not events.is_on:
        return
    if attempt == 1:
        _number(events, member)
        member.began = started
        events.begin(member.identity.number)
    event = TrajectoryStarted(at=events.now(), **_named(member), attempt=attempt)
    events.tell_event(member.identity.number, event)


def emit_ended(events: EventStream, member: Member, trajectory: Trajectory) -> None:
    """A member has its outcome; emitted where a reader wants that."""
    if not events.is_on:
        return
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


def emit_group_ended(
    events: EventStream, ended: Mapping[Member, Trajectory], verdict: str = ""
) -> None:
    """All members of a group have ended; in member order."""
    if not (ended and events.is_on):
        return
    first = next(iter(ended))
    began = [member.began for member in ended if member.began is not None]
    now = events.now()
    events.emit(
        GroupEnded(
            at=now,
            batch=first.batch,
            group=first.identity.group,
            uid=first.identity.uid,
            began=events.since_start(min(began)) if began else now,
            rewards=tuple(each.reward for each in ended.values()),
            outcomes=tuple(each.outcome.value for each in ended.values()),
            verdict=verdict,
        )
    )


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
