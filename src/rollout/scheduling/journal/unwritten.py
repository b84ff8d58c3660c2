"""What becomes of a trajectory that holds what cannot be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.chat.plain_data import encoder
from rollout.errors import JournalError
from rollout.scheduling.journal.frames import most_bytes
from rollout.scheduling.journal.plain_data import plain
from rollout.types import Cause, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.chat.trajectory import Trajectory

#: Its reason.
UNWRITABLE = "journal"


def fail_unwritten(trajectory: Trajectory, fault: JournalError) -> None:
    """It fails, and what of it cannot be written is gone from it."""
    trajectory.outcome, trajectory.reason = Outcome.FAILED, UNWRITABLE
    trajectory.limit_source, trajectory.cause = None, Cause.of(fault)
    trajectory.trainable, trajectory.reward = False, None
    for segment in trajectory.segments:
        segment.reward = segment.token_rewards = None
    trajectory.extra = _plain_of(trajectory.extra)
    trajectory.metrics = _plain_of(trajectory.metrics)


def drop_messages(trajectory: Trajectory) -> None:
    """What they hold cannot be written at all."""
    trajectory.messages = []
    for segment in trajectory.segments:
        segment.messages = []
    trajectory.turn_scores, trajectory.tool_rewards = [], []


def drop_large(trajectory: Trajectory, size: int) -> JournalError:
    """Drop what makes most of a trajectory that is packed in so many bytes; says what that was."""
    sizes = {key: _size({key: value}) for key, value in trajectory.extra.items()}
    if 2 * sum(sizes.values()) < size:
        drop_messages(trajectory)
        what = "messages"
    else:
        what = f"extra[{max(sizes, key=lambda key: sizes[key])!r}]"
        trajectory.extra = {}
    return JournalError(
        f"{what}: the trajectory is packed in {size:,} bytes; expected at most {most_bytes():,}"
    )


def _size(item: Any) -> int:
    try:
        return len(encoder.encode(plain(item, "")))
    except JournalError:  # its text may be as long
        return len(repr(item))


def _plain_of(items: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in items.items() if _is_plain(key, value)}


def _is_plain(key: Any, value: Any) -> bool:
    try:
        plain({key: value}, "")
    except JournalError:
        return False
    return True
