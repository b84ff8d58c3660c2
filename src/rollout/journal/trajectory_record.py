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
from rollout.journal.values import UNENCODABLE, Unwritable
from rollout.types import Cause, Outcome, format_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.types import Prompt

_decoder = msgspec.msgpack.Decoder(PackedTrajectory, ext_hook=from_plain)

#: Reason of a trajectory that fails because it holds what cannot be written.
UNWRITABLE = "journal"


def pack_end(trajectory: Trajectory, unwritable: Unwritable) -> bytes:
    """Pack a finished trajectory, without its prompt.

    One that holds what cannot be written fails by that, and loses its messages and all values.
    """
    try:
        return _encode(trajectory, unwritable)
    except UNENCODABLE as error:
        why = str(error) if isinstance(error, NotPlainError) else format_error(error)
        trajectory.cause = Cause.of(JournalError(why))
    trajectory.outcome, trajectory.reason = Outcome.FAILED, UNWRITABLE
    trajectory.limit_source, trajectory.trainable, trajectory.reward = None, False, None
    trajectory.extra, trajectory.metrics, trajectory.messages = {}, {}, []
    trajectory.turn_scores, trajectory.tool_rewards = [], []
    for segment in trajectory.segments:
        segment.reward, segment.token_rewards, segment.messages = None, None, []
    return _encode(trajectory, unwritable)


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
