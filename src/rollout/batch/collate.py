"""Trajectories to the tensors that a trainer reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from rollout.batch.metrics import batch_metrics
from rollout.batch.records import Sample
from rollout.batch.rollout_batch import RolloutBatch
from rollout.batch.rows import (
    Lengths,
    count_tokens,
    find_media,
    pack_columns,
    pad_columns,
    read_columns,
)
from rollout.media.tensors import MultiModalInputs
from rollout.tensor_layout import Layout, Trim, layout_faults, trim_width

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.chat.trajectory import Segment, Trajectory
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
    rows = [(row, at) for row in trajectories for at in range(len(row.segments))]
    samples = [_make_sample(row, *where) for row, where in enumerate(rows)]
    segments = [trajectory.segments[at] for trajectory, at in rows]
    _check_rows(samples, segments, lengths)
    columns = read_columns(segments, processor, position_rows)
    if layout == "padded":
        longest = (max(map(len, columns[key]), default=0) for key in ("prompts", "responses"))
        prompt, response = longest
        widths = (
            trim_width(prompt, lengths.prompt, trim),
            trim_width(response, lengths.response, trim),
        )
        tensors = pad_columns(columns, widths, pad_token_id)
    else:
        tensors = pack_columns(columns)
    rewards = [math.nan if each.reward is None else each.reward for each in samples]
    trainable, groups = [each.trainable for each in samples], [each.group for each in samples]
    # On the CPU, whatever torch's default device is.
    tensors["trainable"] = torch.tensor(trainable, dtype=torch.bool, device="cpu")
    tensors["rewards"] = torch.tensor(rewards, dtype=torch.float32, device="cpu")
    tensors["groups"] = torch.tensor(groups, dtype=torch.int64, device="cpu")
    media = [find_media(segment.transcript) for segment in segments]
    return RolloutBatch(
        tensors=TensorDict(tensors, batch_size=[len(rows)]),
        samples=samples,
        metrics=batch_metrics(trajectories, extra_metrics or {}),
        trajectories=list(trajectories),
        decode=decode,
        multi_modal_inputs=MultiModalInputs(media, processor),
    )


def _make_sample(row: int, trajectory: Trajectory, at: int) -> Sample:
    segment = trajectory.segments[at]
    return Sample(
        **{name: getattr(trajectory, name) for name in _OF_TRAJECTORY},
        **{name: getattr(segment, name) for name in _OF_SEGMENT},
        row=row,
        segment=at,
        trainable=trajectory.is_trainable(segment),
        reward=trajectory.reward_of(segment),
    )


def _check_rows(samples: Sequence[Sample], segments: Sequence[Segment], lengths: Lengths) -> None:
    """Raise a ValueError that names a row which does not fit into the batch."""
    for sample, segment in zip(samples, segments, strict=True):
        transcript, rewards = segment.transcript, segment.token_rewards
        name = f"{sample.uid!r} member {sample.member}"
        for what, found in zip(("prompt", "response"), count_tokens(transcript), strict=True):
            if found > (longest := getattr(lengths, what)):
                raise ValueError(
                    f"{name}: its {what} has {found} tokens, lengths.{what} = {longest}"
                )
        if rewards is not None and len(rewards) != transcript.response_length:
            raise ValueError(
                f"{name}: segments[{sample.segment}] has {len(rewards)} token_rewards; "
                f"expected {transcript.response_length}"
            )
