"""Trajectories to the tensors that a trainer reads: rectangles, or rows one after the other.

Shapes: B rows, P prompt width, R response width; of a row T tokens, N of them in the response.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from rollout.batch.metrics import batch_metrics
from rollout.batch.records import Sample, count_tokens, find_media
from rollout.batch.rollout_batch import RolloutBatch
from rollout.chat.trajectory import TrajectoryFacts
from rollout.chat.trajectory_codec import SEGMENT_FACTS
from rollout.chat.transcript import NO_EXPERT, NO_VERSION
from rollout.media.tensors import MultiModalInputs
from rollout.tensor_layout import Layout, Trim, layout_faults, trim_width

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.chat.trajectory import Segment, Trajectory
    from rollout.config import LengthsConfig
    from rollout.media.processor import MediaProcessor

#: The arrays of all rows by the names that they have in `RolloutBatch.tensors`.
Columns = dict[str, list[npt.NDArray[Any]]]

#: By key: which part of a row has a value for each of its tokens, the type, and what padded
#: positions hold; ids hold the padding token.
KEYS = {
    "prompts": ("prompt", torch.int64, None),
    "responses": ("response", torch.int64, None),
    "response_mask": ("response", torch.int64, 0),
    "input_ids": ("both", torch.int64, None),
    "attention_mask": ("both", torch.int64, 0),
    "position_ids": ("both", torch.int64, 0),
    "rollout_log_probs": ("response", torch.float32, 0),
    "weight_versions": ("response", torch.int32, NO_VERSION),
    "token_rewards": ("response", torch.float32, 0),
    "routed_experts": ("both", torch.int16, NO_EXPERT),
}


def collate(
    trajectories: Sequence[Trajectory],
    lengths: LengthsConfig,
    pad_token_id: int,
    layout: Layout = "padded",
    *,
    trim: Trim = False,
    decode: Callable[[Sequence[int]], str] | None = None,
    extra_metrics: Mapping[str, float] | None = None,
    processor: MediaProcessor | None = None,
    position_rows: int = 3,
) -> RolloutBatch:
    """One row of tensors for each segment, in their order; shapes as in `RolloutBatch`.

    Segments of one trajectory are adjacent, in their order. One without tokens becomes a row of
    padding with attention 0 (packed: of length 0). Tokens observed after the last generated one
    stay in the transcript and are left out of the tensors: a training row never ends on an
    observation.

    Args:
        trajectories: With B segments.
        lengths: The most tokens of a prompt and of a response; P and R without `trim`.
        pad_token_id: Fills padded positions of ids.
        layout: "padded" for rectangles, "packed" for jagged nested tensors without padding.
        trim: True makes P and R those of the longest prompt and the longest response; a number
            makes each the next multiple of it that has room for those, which may be more than
            `lengths` by less than the number. Nothing changes for "packed", which has no padding.
        decode: Ids to text, for `RolloutBatch.save`.
        extra_metrics: Added to the metrics, e.g. the event loop's lag.
        processor: The model's, where it reads images or videos: `multi_modal_inputs` and the
            positions of M-RoPE families come from it.
        position_rows: Rows of those positions: 3, or 4 with those of a text-only row before them.

    Raises:
        ValueError: A prompt or response is longer than `lengths` allow, or has token rewards of
            another length, and its uid is named; or `layout` or `trim` is unknown.
    """
    if faults := layout_faults(layout, trim):
        raise ValueError("\n".join(faults))
    rows = [(row, at) for row in trajectories for at in range(len(row.segments))]
    samples = [_make_sample(row, *where) for row, where in enumerate(rows)]
    segments = [trajectory.segments[at] for trajectory, at in rows]
    _check_rows(samples, segments, lengths)
    columns = _read_columns(segments, processor, position_rows)
    if layout == "padded":
        most = {"prompts": lengths.prompt, "responses": lengths.response}
        longest = {key: max(map(len, columns[key]), default=0) for key in most}
        widths = [trim_width(longest[key], most[key], trim) for key in most]
        tensors = _pad_columns(columns, widths, pad_token_id)
    else:
        tensors = _pack_columns(columns)
    rewards = [math.nan if each.reward is None else each.reward for each in samples]
    for key, values, dtype in (
        ("trainable", [each.trainable for each in samples], torch.bool),
        ("rewards", rewards, torch.float32),
        ("groups", [each.group for each in samples], torch.int64),
    ):  # on the CPU, whatever torch's default device is
        tensors[key] = torch.tensor(values, dtype=dtype, device="cpu")
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
    facts = {name: getattr(trajectory, name) for name in TrajectoryFacts.__struct_fields__}
    facts |= {name: getattr(segment, name) for name in SEGMENT_FACTS}
    facts["trainable"] = trajectory.is_trainable(segment)
    facts["reward"] = trajectory.reward_of(segment)
    return Sample(**facts, row=row, segment=at)


def _check_rows(
    samples: Sequence[Sample], segments: Sequence[Segment], lengths: LengthsConfig
) -> None:
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


def _read_columns(
    segments: Sequence[Segment], processor: MediaProcessor | None, position_rows: int
) -> Columns:
    """Read the arrays of rows out of their segments, each as long as `KEYS` says.

    ``position_ids`` are (T,), or (T, position_rows) of M-RoPE families; ``token_rewards`` and
    ``routed_experts``, (T, layers, top_k), are there only where a row has some.
    """
    shapes = (segment.transcript.expert_shape for segment in segments)
    shape = next((each for each in shapes if each is not None), None)
    has_rewards = any(segment.token_rewards is not None for segment in segments)
    optional = {"token_rewards": has_rewards, "routed_experts": shape is not None}
    columns: Columns = {key: [] for key in KEYS if optional.get(key, True)}
    for segment in segments:
        transcript, rewards = segment.transcript, segment.token_rewards
        start, response = count_tokens(transcript)
        stop = start + response
        ids = np.frombuffer(transcript.ids_bytes(), dtype=np.int32)[:stop]
        positions: npt.NDArray[Any] = np.arange(stop)
        if processor is not None and processor.position_rows > 1:
            own = processor.position_ids(ids, find_media(transcript))
            positions = (own if position_rows == 3 else np.concatenate([positions[None], own])).T
        row = {
            "prompts": ids[:start],
            "responses": ids[start:],
            "response_mask": transcript.mask()[start:stop],
            "input_ids": ids,
            "attention_mask": np.broadcast_to(np.int64(1), stop),
            "position_ids": positions,
            "rollout_log_probs": transcript.log_probs()[start:stop],
            "weight_versions": transcript.weight_versions()[start:stop],
        }
        if has_rewards:
            unknown = np.full(response, np.nan, dtype=np.float32)
            row["token_rewards"] = unknown if rewards is None else np.asarray(rewards)[:response]
        if shape is not None:
            experts = transcript.routed_experts()
            unknown = np.full((stop, *shape), NO_EXPERT, dtype=np.int16)
            row["routed_experts"] = unknown if experts is None else experts[:stop]
        for key, values in row.items():
            columns[key].append(values)
    return columns


def _pad_columns(
    columns: Columns, widths: Sequence[int], pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Make rectangles (B, P) and (B, R): prompts padded on the left, responses on the right."""
    prompt, response = widths
    width = {"prompt": prompt, "response": response, "both": prompt + response}
    starts = [prompt - len(ids) for ids in columns["prompts"]]
    tensors = {}
    for key, rows in columns.items():
        part, dtype, filler = KEYS[key]
        shape = (len(rows), width[part], *(rows[0].shape[1:] if rows else ()))
        filler = pad_token_id if filler is None else filler
        tensor = torch.full(shape, filler, dtype=dtype, device="cpu")
        padded = tensor.numpy()
        for at, values in enumerate(rows):
            start = 0 if part == "response" else starts[at]
            padded[at, start : start + len(values)] = values
        tensors[key] = tensor
    if tensors["position_ids"].dim() == 3:  # of an M-RoPE family: (B, 3 or 4, P + R)
        tensors["position_ids"] = tensors["position_ids"].transpose(1, 2).contiguous()
    return tensors


def _pack_columns(columns: Columns) -> dict[str, torch.Tensor]:
    """Make jagged nested tensors: the rows one after the other, without padding.

    Keys of equal lengths share their offsets: torch then lets them be combined.
    """
    offsets, tensors = {}, {}
    for key, rows in columns.items():
        part, dtype, _ = KEYS[key]
        if part not in offsets:
            ends = np.cumsum([len(values) for values in rows])
            offsets[part] = torch.tensor([0, *ends], dtype=torch.int64, device="cpu")
        shape = (int(offsets[part][-1]), *(rows[0].shape[1:] if rows else ()))
        packed = torch.empty(shape, dtype=dtype, device="cpu")
        if rows:
            np.concatenate(rows, out=packed.numpy(), casting="unsafe")
        tensors[key] = torch.nested.nested_tensor_from_jagged(packed, offsets[part])
    return tensors
