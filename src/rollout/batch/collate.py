"""Trajectories to the tensors that a trainer reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from rollout.batch.metrics import batch_metrics
from rollout.batch.rollout_batch import RolloutBatch
from rollout.batch.sample import Sample
from rollout.chat.transcript import NO_EXPERT, NO_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.chat.trajectory import Segment, Trajectory

Layout = Literal["padded", "packed"]


class Lengths(Protocol):
    """The widths of the tensors in tokens; `rollout.LengthsConfig` has them."""

    @property
    def prompt(self) -> int:
        """P."""

    @property
    def response(self) -> int:
        """R."""


class _Place(NamedTuple):
    """A segment of a trajectory: one row."""

    trajectory: Trajectory
    at: int

    @property
    def segment(self) -> Segment:
        return self.trajectory.segments[self.at]


class _Row:
    """The tokens of one segment that go into the tensors: up to the last generated one.

    Shapes: T tokens of prompt and response, N tokens of the response.
    """

    def __init__(self, place: _Place, lengths: Lengths) -> None:
        trajectory, transcript = place.trajectory, place.segment.transcript
        stop = len(transcript) - transcript.trailing_observation_length
        self.prompt_length = start = transcript.prompt_length
        _check_length(trajectory, "prompt", start, lengths.prompt)
        _check_length(trajectory, "response", stop - start, lengths.response)
        self.ids = transcript.ids()[:stop]  # (T,)
        self.mask = transcript.mask()[start:stop]  # (N,)
        self.log_probs = transcript.log_probs()[start:stop]  # (N,)
        self.versions = transcript.weight_versions()[start:stop]  # (N,)
        experts = transcript.routed_experts()
        self.experts = None if experts is None else experts[:stop]  # (T, layers, top_k)
        values = place.segment.token_rewards
        if values is not None and len(values) != transcript.response_length:
            raise ValueError(
                f"{trajectory.uid!r} member {trajectory.member}: segments[{place.at}] has "
                f"{len(values)} token_rewards; expected {transcript.response_length}"
            )
        self._rewards = None if values is None else np.array(values, dtype=np.float32)

    @property
    def token_rewards(self) -> npt.NDArray[np.float32]:
        """(N,); NaN where nobody gave any."""
        if self._rewards is None:
            return np.full(len(self.mask), np.nan, dtype=np.float32)
        return self._rewards[: len(self.mask)]


def collate(
    trajectories: Sequence[Trajectory],
    lengths: Lengths,
    pad_token_id: int,
    layout: Layout = "padded",
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
    extra_metrics: Mapping[str, float] | None = None,
) -> RolloutBatch:
    """One row of tensors for each segment, in the order given; shapes as in `RolloutBatch`.

    Segments of one trajectory are adjacent, in their order. One without tokens becomes a row of
    padding with attention 0 (packed: of length 0). Tokens observed after the last generated one
    stay in the transcript and are left out of the tensors: a training row never ends on an
    observation.

    Args:
        trajectories: With B segments.
        lengths: P and R.
        pad_token_id: Fills padded positions of ids.
        layout: "padded" for rectangles, "packed" for jagged nested tensors without padding.
        decode: Ids to text, kept for `RolloutBatch.save`.
        extra_metrics: Added to the metrics, e.g. the event loop's lag.

    Raises:
        ValueError: A prompt or response is longer than `lengths` allow; names the uid.
    """
    rows = [_Place(each, at) for each in trajectories for at in range(len(each.segments))]
    if layout == "padded":
        tensors = _padded(rows, lengths, pad_token_id)
    elif layout == "packed":
        tensors = _packed(rows, lengths)
    else:
        raise ValueError(f"layout must be 'padded' or 'packed', not {layout!r}")
    tensors |= _of_rows(rows)
    return RolloutBatch(
        tensors=TensorDict(tensors, batch_size=[len(rows)]),
        samples=[_sample(at, place) for at, place in enumerate(rows)],
        metrics=batch_metrics(trajectories, extra_metrics or {}),
        trajectories=list(trajectories),
        decode=decode,
    )


def _of_rows(rows: Sequence[_Place]) -> dict[str, torch.Tensor]:
    """What has one value for each row, (B,)."""
    known = [row.trajectory.reward_of(row.segment) for row in rows]
    rewards = [math.nan if reward is None else reward for reward in known]
    trainable = [row.trajectory.is_trainable(row.segment) for row in rows]
    return {
        "trainable": torch.tensor(trainable, dtype=torch.bool),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        "groups": torch.tensor([row.trajectory.group for row in rows], dtype=torch.int64),
    }


def _padded(rows: Sequence[_Place], lengths: Lengths, pad_token_id: int) -> dict[str, torch.Tensor]:
    size, width = len(rows), lengths.prompt
    whole, response = (size, width + lengths.response), (size, lengths.response)
    input_ids = np.full(whole, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(whole, dtype=np.int64)
    position_ids = np.zeros(whole, dtype=np.int64)
    response_mask = np.zeros(response, dtype=np.int64)
    log_probs = np.zeros(response, dtype=np.float32)
    versions = np.full(response, NO_VERSION, dtype=np.int32)
    token_rewards = np.zeros(response, dtype=np.float32) if _has_token_rewards(rows) else None
    positions = np.arange(whole[1])
    shape = _expert_shape(rows)
    experts = None if shape is None else np.full((*whole, *shape), NO_EXPERT, dtype=np.int16)
    for at, each in enumerate(rows):
        row = _Row(each, lengths)
        place = slice(width - row.prompt_length, width - row.prompt_length + len(row.ids))
        input_ids[at, place] = row.ids
        attention_mask[at, place] = 1
        # The row is contiguous, so that this is cumsum(attention) - 1 on it.
        position_ids[at, place] = positions[: len(row.ids)]
        response_mask[at, : len(row.mask)] = row.mask
        log_probs[at, : len(row.mask)] = row.log_probs
        versions[at, : len(row.mask)] = row.versions
        if experts is not None and row.experts is not None:
            experts[at, place] = row.experts
        if token_rewards is not None:
            token_rewards[at, : len(row.mask)] = row.token_rewards
    arrays: dict[str, npt.NDArray[Any]] = {
        "prompts": input_ids[:, :width].copy(),
        "responses": input_ids[:, width:].copy(),
        "response_mask": response_mask,
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "rollout_log_probs": log_probs,
        "weight_versions": versions,
    }
    if token_rewards is not None:
        arrays["token_rewards"] = token_rewards
    if experts is not None:
        arrays["routed_experts"] = experts
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


def _expert_shape(rows: Sequence[_Place]) -> tuple[int, int] | None:
    """(layers, top_k) of the rows whose routed experts are known; None where none are.

    Raises:
        ValueError: Not all have the same.
    """
    found: tuple[int, int] | None = None
    for row in rows:
        trajectory, shape = row.trajectory, row.segment.transcript.expert_shape
        if shape is not None and shape != (found or shape):
            raise ValueError(
                f"{trajectory.uid!r} member {trajectory.member}: routed experts of shape {shape}, "
                f"other rows have {found}"
            )
        found = found or shape
    return found


def _has_token_rewards(rows: Sequence[_Place]) -> bool:
    return any(row.segment.token_rewards is not None for row in rows)


def _packed(places: Sequence[_Place], lengths: Lengths) -> dict[str, torch.Tensor]:
    rows, experts = [_Row(place, lengths) for place in places], _expert_shape(places)
    # Keys of equal lengths share their offsets: torch then lets them be combined.
    prompt = _offsets([row.prompt_length for row in rows])
    response = _offsets([len(row.mask) for row in rows])
    whole = _offsets([len(row.ids) for row in rows])
    positions = [np.arange(len(row.ids)) for row in rows]
    ones = [np.ones(len(row.ids), dtype=np.int64) for row in rows]
    tensors = {
        "prompts": _jagged([row.ids[: row.prompt_length] for row in rows], np.int64, prompt),
        "responses": _jagged([row.ids[row.prompt_length :] for row in rows], np.int64, response),
        "response_mask": _jagged([row.mask for row in rows], np.int64, response),
        "input_ids": _jagged([row.ids for row in rows], np.int64, whole),
        "attention_mask": _jagged(ones, np.int64, whole),
        "position_ids": _jagged(positions, np.int64, whole),
        "rollout_log_probs": _jagged([row.log_probs for row in rows], np.float32, response),
        "weight_versions": _jagged([row.versions for row in rows], np.int32, response),
    }
    if _has_token_rewards(places):
        rewards = [row.token_rewards for row in rows]
        tensors["token_rewards"] = _jagged(rewards, np.float32, response)
    if experts is not None:
        nothing = np.int16(NO_EXPERT)
        pieces = [
            np.full((len(row.ids), *experts), nothing) if row.experts is None else row.experts
            for row in rows
        ]
        tensors["routed_experts"] = _jagged(pieces, np.int16, whole)
    return tensors


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))


def _jagged(
    pieces: Sequence[npt.NDArray[Any]], dtype: type[np.generic], offsets: torch.Tensor
) -> torch.Tensor:
    empty = np.zeros((0, *pieces[0].shape[1:]) if pieces else 0, dtype)
    values = np.concatenate([empty, *pieces], dtype=dtype, casting="unsafe")
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), offsets)


def _check_length(trajectory: Trajectory, what: str, length: int, longest: int) -> None:
    if length > longest:
        raise ValueError(
            f"{trajectory.uid!r} member {trajectory.member}: its {what} has {length} tokens, "
            f"lengths.{what} = {longest}"
        )


def _sample(row: int, place: _Place) -> Sample:
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
