"""Trajectories to the tensors that a trainer reads."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from rollout.batch.metrics import batch_metrics
from rollout.batch.multi_modal import MultiModalInputs, RowPositions, media_of_rows
from rollout.batch.packed import PackedTensors
from rollout.batch.padded import PaddedTensors
from rollout.batch.rollout_batch import RolloutBatch
from rollout.batch.rows import Lengths, Place, Rows
from rollout.batch.sample import Sample
from rollout.batch.tensor_memory import TensorMemory
from rollout.tensor_layout import Layout, Trim, layout_faults, trimmed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.chat.processors import MediaProcessor
    from rollout.chat.trajectory import Trajectory

#: Threads that fill large tensors, on a machine with twice as many CPUs.
MAX_THREADS = 4


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
    memory: TensorMemory | None = None,
) -> RolloutBatch:
    """One row of tensors for each segment, in the order given; shapes as in `RolloutBatch`.

    Segments of one trajectory are adjacent, in their order. One without tokens becomes a row of
    padding with attention 0 (packed: of length 0). Tokens observed after the last generated one
    stay in the transcript and are left out of the tensors: a training row never ends on an
    observation.

    In a thread it lets others run: no piece of its work holds Python's interpreter lock for long.

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
        memory: Where large tensors lie, in what batches before have left there; None takes it of
            the system.

    Raises:
        ValueError: A prompt or response is longer than `lengths` allow, and its uid is named; or
            `layout` or `trim` is none.
    """
    faults = layout_faults(layout, trim)
    if position_rows not in (3, 4):
        faults.append(f"position_rows = {position_rows!r:.80}: expected 3 or 4")
    if faults:
        raise ValueError("\n".join(faults))
    rows = Rows(trajectories, lengths)
    media = media_of_rows(trajectories)
    if processor is not None and processor.position_rows > 1:
        rows.positions = RowPositions(processor, media, position_rows)
    memory = memory or TensorMemory()
    if layout == "padded":
        tensors = _padded(rows, lengths, pad_token_id, trim, memory)
    else:
        tensors = _packed(rows, memory)
    tensors |= _of_rows(rows.places)
    return RolloutBatch(
        tensors=TensorDict(tensors, batch_size=[len(rows)]),
        samples=[_sample(at, place) for at, place in enumerate(rows.places)],
        metrics=batch_metrics(trajectories, extra_metrics or {}),
        trajectories=list(trajectories),
        decode=decode,
        multi_modal_inputs=MultiModalInputs(media, processor),
    )


def _padded(
    rows: Rows, lengths: Lengths, pad_token_id: int, trim: Trim, memory: TensorMemory
) -> dict[str, torch.Tensor]:
    prompt = trimmed(int(rows.prompts.max(initial=0)), lengths.prompt, trim)
    response = trimmed(int(rows.responses.max(initial=0)), lengths.response, trim)
    padded = PaddedTensors(rows, prompt, response, pad_token_id, memory)
    _fill(padded, rows, np.full(len(rows), padded.width))
    return {name: torch.from_numpy(array) for name, array in padded.arrays.items()}


def _packed(rows: Rows, memory: TensorMemory) -> dict[str, torch.Tensor]:
    packed = PackedTensors(rows, memory)
    _fill(packed, rows, rows.prompts + rows.responses)
    offsets = {id(each): torch.from_numpy(each) for each in packed.offsets.values()}
    return {
        name: torch.nested.nested_tensor_from_jagged(
            torch.from_numpy(array), offsets[id(packed.offsets[name])]
        )
        for name, array in packed.arrays.items()
    }


def _fill(tensors: PaddedTensors | PackedTensors, rows: Rows, sizes: npt.NDArray[np.int64]) -> None:
    """Write all rows, of these sizes in tokens; large ones in threads, since memory is slow."""

    def fill(chunk: slice) -> None:
        tensors.fill(rows, rows.tokens(chunk))

    chunks = list(rows.chunks(sizes))
    threads = min(MAX_THREADS, (os.cpu_count() or 1) // 2, len(chunks))
    if threads > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="rollout-collate") as pool:
            for _ in pool.map(fill, chunks):
                pass
    else:
        for chunk in chunks:
            fill(chunk)


def _of_rows(places: Sequence[Place]) -> dict[str, torch.Tensor]:
    """What has one value for each row, (B,); on the CPU, whatever torch's default device is."""
    known = [place.trajectory.reward_of(place.segment) for place in places]
    rewards = [math.nan if reward is None else reward for reward in known]
    trainable = [place.trajectory.is_trainable(place.segment) for place in places]
    groups = [place.trajectory.group for place in places]
    return {
        "trainable": torch.tensor(trainable, dtype=torch.bool, device="cpu"),
        "rewards": torch.tensor(rewards, dtype=torch.float32, device="cpu"),
        "groups": torch.tensor(groups, dtype=torch.int64, device="cpu"),
    }


def _sample(row: int, place: Place) -> Sample:
    trajectory, segment = place.trajectory, place.segment
    return Sample(
        uid=trajectory.uid,
        group=trajectory.group,
        member=trajectory.member,
        row=row,
        num_turns=trajectory.num_turns,
        outcome=trajectory.outcome,
        reason=trajectory.reason,
        limit_source=trajectory.limit_source,
        trainable=trajectory.is_trainable(segment),
        reward=trajectory.reward_of(segment),
        turn_scores=trajectory.turn_scores,
        tool_rewards=trajectory.tool_rewards,
        metrics=trajectory.metrics,
        extra=trajectory.extra,
        segment=place.at,
        parent=segment.parent,
        purpose=segment.purpose,
        session_id=segment.session_id,
        seeds=segment.seeds,
    )
