"""The rows of a batch: of each, the arrays that its tensors are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rollout.chat.transcript import NO_EXPERT, NO_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.batch.multi_modal import RowPositions
    from rollout.chat.trajectory import Segment, Trajectory

#: The arrays of one row by the names that they have in `RolloutBatch.tensors`.
Arrays = dict[str, npt.NDArray[Any]]


class Lengths(Protocol):
    """The widths of the tensors in tokens; `rollout.LengthsConfig` has them."""

    @property
    def prompt(self) -> int:
        """P."""

    @property
    def response(self) -> int:
        """R."""


class Row(NamedTuple):
    """A segment of a trajectory.

    Attributes:
        at: Its index among the trajectory's segments.
        prompt: Tokens of its prompt.
        response: Tokens of its response, up to the last generated one.
    """

    trajectory: Trajectory
    at: int
    segment: Segment
    prompt: int
    response: int


def list_rows(trajectories: Sequence[Trajectory], lengths: Lengths) -> list[Row]:
    """A row for each segment, in order.

    Raises:
        ValueError: A prompt or a response is longer than `lengths` allow, or a segment has not one
            token reward for each token of its response; names the uid.
    """
    rows = []
    for trajectory in trajectories:
        for at, segment in enumerate(trajectory.segments):
            transcript, rewards = segment.transcript, segment.token_rewards
            observed = transcript.response_length
            response = observed - transcript.trailing_observation_length
            row = Row(trajectory, at, segment, transcript.prompt_length, response)
            _check_length(row, "prompt", row.prompt, lengths.prompt)
            _check_length(row, "response", row.response, lengths.response)
            if rewards is not None and len(rewards) != observed:
                raise ValueError(
                    f"{trajectory.uid!r} member {trajectory.member}: segments[{at}] has "
                    f"{len(rewards)} token_rewards; expected {observed}"
                )
            rows.append(row)
    return rows


def read_arrays(rows: Sequence[Row], positions: RowPositions | None) -> list[Arrays]:
    """The arrays of each row; all rows have the same keys.

    Shapes: of a row T tokens, N of them in the response: ``prompts`` (T - N,), ``responses``,
    ``response_mask``, ``rollout_log_probs``, ``weight_versions``, ``token_rewards`` (N,),
    ``input_ids`` (T,), ``position_ids`` (T,) or (T, 3 or 4), ``routed_experts`` (T, layers, top_k).

    Args:
        rows: Of the batch.
        positions: Of an M-RoPE family; None: a token's position is its index.

    Raises:
        ValueError: Routed experts are not of one shape.
    """
    experts = _find_expert_shape(rows)
    has_rewards = any(row.segment.token_rewards is not None for row in rows)
    found = []
    for index, row in enumerate(rows):
        transcript, stop = row.segment.transcript, row.prompt + row.response
        ids = np.frombuffer(transcript.ids_bytes(), dtype=np.int32)[:stop]
        mask, versions = _read_runs(row)
        log_probs = np.zeros(row.response, dtype=np.float32)
        log_probs[mask] = np.frombuffer(transcript.log_probs_bytes(), dtype=np.float32)
        arrays = {
            "prompts": ids[: row.prompt],
            "responses": ids[row.prompt :],
            "response_mask": mask,
            "input_ids": ids,
            "position_ids": (
                np.arange(stop) if positions is None else positions.read_positions(index, ids).T
            ),
            "rollout_log_probs": log_probs,
            "weight_versions": versions,
        }
        if has_rewards:
            rewards = row.segment.token_rewards
            arrays["token_rewards"] = (
                np.full(row.response, np.nan, dtype=np.float32)
                if rewards is None
                else np.array(rewards, dtype=np.float32)[: row.response]
            )
        if experts is not None:
            known = transcript.routed_experts()
            arrays["routed_experts"] = (
                np.full((stop, *experts), NO_EXPERT, dtype=np.int16)
                if known is None
                else known[:stop]
            )
        found.append(arrays)
    return found


def _read_runs(row: Row) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
    """(N,) whether a response token was sampled, and by which weights."""
    mask = np.zeros(row.response, dtype=np.bool_)
    versions = np.full(row.response, NO_VERSION, dtype=np.int32)
    start = 0
    for count, version in row.segment.transcript.runs():
        if version is not None:
            mask[start : start + count] = True
            versions[start : start + count] = version
        start += count
    return mask, versions


def _check_length(row: Row, what: str, length: int, longest: int) -> None:
    if length > longest:
        raise ValueError(
            f"{row.trajectory.uid!r} member {row.trajectory.member}: its {what} has {length} "
            f"tokens, lengths.{what} = {longest}"
        )


def _find_expert_shape(rows: Sequence[Row]) -> tuple[int, int] | None:
    """(layers, top_k) of the rows whose routed experts are known; None where none are."""
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
