"""A finished trajectory as the bytes of an end record, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.agents.history import Messages
from rollout.chat.plain_data import NotPlainError, encoder, from_plain
from rollout.chat.trajectory_codec import (
    PackedTrajectory,
    pack_message,
    pack_trajectory,
    unpack_message,
    unpack_trajectory,
)
from rollout.errors import JournalError
from rollout.journal.values import REFUSE, UNENCODABLE, Unwritable
from rollout.types import Cause, Outcome, format_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from rollout.chat.trajectory import Trajectory
    from rollout.types import Prompt

_decoder = msgspec.msgpack.Decoder(PackedTrajectory, ext_hook=from_plain)

#: Reason of a trajectory that fails because it holds what cannot be written.
UNWRITABLE = "journal"


def pack_end(trajectory: Trajectory, unwritable: Unwritable) -> bytes:
    """Pack a finished trajectory, without its prompt.

    One that holds what cannot be written fails by that, and loses it: what is no plain data in its
    `extra` and `metrics`; where that is not enough, all of these, its messages and scores.
    """
    for is_last in (False, True):
        try:
            return _encode(trajectory, unwritable)
        except UNENCODABLE as error:
            _fail(trajectory, error)
        trajectory.extra = {} if is_last else _keep_plain(trajectory.extra)
        trajectory.metrics = {} if is_last else _keep_plain(trajectory.metrics)
        if is_last:
            trajectory.messages, trajectory.turn_scores, trajectory.tool_rewards = [], [], []
            for segment in trajectory.segments:
                segment.messages = []
    return _encode(trajectory, unwritable)


def _fail(trajectory: Trajectory, error: Exception) -> None:
    why = str(error) if isinstance(error, NotPlainError) else format_error(error)
    trajectory.outcome, trajectory.reason = Outcome.FAILED, UNWRITABLE
    trajectory.limit_source, trajectory.cause = None, Cause.of(JournalError(why))
    trajectory.trainable, trajectory.reward = False, None
    for segment in trajectory.segments:
        segment.reward = segment.token_rewards = None


def _keep_plain(items: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in items.items() if _is_plain({key: value})}


def _is_plain(items: Mapping[Any, Any]) -> bool:
    try:
        encoder.encode(REFUSE.pack_items(items, ""))
    except UNENCODABLE:
        return False
    return True


def _encode(trajectory: Trajectory, unwritable: Unwritable) -> bytes:
    write = unwritable.pack_value
    return encoder.encode(
        pack_trajectory(trajectory, write, lambda given: [pack_message(m, write) for m in given])
    )


def unpack_end(
    packed: bytes, prompt: Prompt | None, decode: Callable[[Sequence[int]], str]
) -> Trajectory:
    """Unpack a trajectory; its images and videos are without their contents.

    Args:
        prompt: What it started from.
        decode: Its ids to text, for who prints it.
    """
    return unpack_trajectory(
        _decoder.decode(packed),
        prompt,
        lambda messages: Messages(list(map(unpack_message, messages)), decode),
    )
