"""Trajectories to the tensors that a trainer reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from rollout.batch.metrics import batch_metrics
from rollout.batch.rollout_batch import RolloutBatch
from rollout.batch.rows import Lengths, Row, check_rows, list_rows, pack_rows, pad_rows, read_arrays
from rollout.batch.sample import Sample
from rollout.media.tensors import MultiModalInputs
from rollout.tensor_layout import Layout, Trim, layout_faults, trim_width

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.media.processor import MediaProcessor

#: What a sample has of its trajectory, and of its segment.
_OF_TRAJECTORY = (
    *("uid", "group", "member", "num_turns", "outcome", "reason", "limit_source"),
    *("turn_scores", "tool_rewards", "metrics", "extra"),
)
_OF_SEGMENT = ("parent", "purpose", "session_id", "seeds")


def collate(
    trajectories: Sequence[Trajectory],
    lengths: Lengths,
    pad_token_id: int,
    layout: Layout = "padded",
    *,
    trim: Trim = False,
    decode: Callable[[Sequence[int]], str] | None = None,
    extra_metrics: Mapping[str, float] | None = None,
    processor: MediaProcessor | None = None,
    position_rows: int = 3,
) -> RolloutBatch:
    """One row of tensors for each segment, in the order given; shapes as in `RolloutBatch`.

    Segments of one trajectory are adjacent, in their order. One without tokens becomes a row of
    padding with attention 0 (packed: of length 0). Tokens observed after the last generated one
    stay in the transcript and are left out of the tensors: a training row never ends on an
    observation.

    Args:
        trajectories: With B segments.
        lengths: The most tokens of a prompt and of a response; P and R unless `trim` is given.
        pad_token_id: Fills padded positions of ids.
        layout: "padded" for rectangles, "packed" for jagged nested tensors without padding.
        trim: True makes P and R those of the longest prompt and the longest response; a number
            makes each the next multiple of it that has room for those, which may be more than
            `lengths` by less than the number. Nothing changes for "packed", which has no padding.
        decode: Ids to text, kept for `RolloutBatch.save`.
        extra_metrics: Added to the metrics, e.g. the event loop's lag.
        processor: The model's, where it reads images or videos: `multi_modal_inputs` and the
            positions of M-RoPE families come from it.
        position_rows: Rows of those positions: 3, or 4 with those of a text-only row before them.

    Raises:
        ValueError: A prompt or response is longer than `lengths` allow, and its uid is named; or
            `layout` or `trim` is none.
    """
    faults = layout_faults(layout, trim)
    if position_rows not in (3, 4):
        faults.append(f"position_rows = {position_rows!r:.80}: expected 3 or 4")
    if faults:
        raise ValueError("\n".join(faults))
    rows = list_rows(trajectories)
    check_rows(rows, lengths)
    arrays = read_arrays(rows, processor, position_rows)
    if layout == "padded":
        widths = (
            trim_width(max((row.prompt for row in rows), default=0), lengths.prompt, trim),
            trim_width(max((row.response for row in rows), default=0), lengths.response, trim),
        )
        tensors = pad_rows(rows, arrays, widths, pad_token_id)
    else:
        tensors = pack_rows(rows, arrays)
    samples = [_make_sample(at, row) for at, row in enumerate(rows)]
    rewards = [math.nan if each.reward is None else each.reward for each in samples]
    trainable, groups = [each.trainable for each in samples], [each.group for each in samples]
    # On the CPU, whatever torch's default device is.
    tensors["trainable"] = torch.tensor(trainable, dtype=torch.bool, device="cpu")
    tensors["rewards"] = torch.tensor(rewards, dtype=torch.float32, device="cpu")
    tensors["groups"] = torch.tensor(groups, dtype=torch.int64, device="cpu")
    return RolloutBatch(
        tensors=TensorDict(tensors, batch_size=[len(rows)]),
        samples=samples,
        metrics=batch_metrics(trajectories, extra_metrics or {}),
        trajectories=list(trajectories),
        decode=decode,
        multi_modal_inputs=MultiModalInputs([row.media for row in rows], processor),
    )


def _make_sample(at: int, row: Row) -> Sample:
    trajectory, segment = row.trajectory, row.segment
    return Sample(
        **{name: getattr(trajectory, name) for name in _OF_TRAJECTORY},
        **{name: getattr(segment, name) for name in _OF_SEGMENT},
        row=at,
        segment=row.at,
        trainable=trajectory.is_trainable(segment),
        reward=trajectory.reward_of(segment),
    )
