"""The rows of a batch, and how they are laid out: in rectangles, or one after the other.

Shapes: B rows, P prompt width, R response width; of a row T tokens, N of them in the response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rollout.chat.transcript import NO_EXPERT, NO_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.chat.trajectory import Segment, Trajectory
    from rollout.media.processor import MediaProcessor
    from rollout.medium import PlacedMedia

#: The arrays of one row by the names that they have in `RolloutBatch.tensors`.
Arrays = dict[str, npt.NDArray[Any]]

#: Which part of a row has a value for each token of it.
PROMPT, RESPONSE, BOTH = "prompt", "response", "both"
#: By key: that part, the type, and what padded positions hold; ids hold the padding token.
KEYS = {
    "prompts": (PROMPT, torch.int64, None),
    "responses": (RESPONSE, torch.int64, None),
    "response_mask": (RESPONSE, torch.int64, 0),
    "input_ids": (BOTH, torch.int64, None),
    "attention_mask": (BOTH, torch.int64, 0),
    "position_ids": (BOTH, torch.int64, 0),
    "rollout_log_probs": (RESPONSE, torch.float32, 0),
    "weight_versions": (RESPONSE, torch.int32, NO_VERSION),
    "token_rewards": (RESPONSE, torch.float32, 0),
    "routed_experts": (BOTH, torch.int16, NO_EXPERT),
}
#: Keys that a batch has only where a row knows something of them.
_OPTIONAL = ("token_rewards", "routed_experts")


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

    @property
    def counts(self) -> dict[str, int]:
        """Tokens of each part."""
        return {PROMPT: self.prompt, RESPONSE: self.response, BOTH: self.prompt + self.response}

    @property
    def media(self) -> list[PlacedMedia]:
        """The media among its tokens."""
        stop, media = self.prompt + self.response, self.segment.transcript.media
        return [each for each in media if each.start + each.count <= stop]


def list_rows(trajectories: Sequence[Trajectory]) -> list[Row]:
    """A row for each segment, in order; what nothing was generated after is left out."""
    return [
        Row(
            trajectory,
            at,
            segment,
            segment.transcript.prompt_length,
            segment.transcript.response_length - segment.transcript.trailing_observation_length,
        )
        for trajectory in trajectories
        for at, segment in enumerate(trajectory.segments)
    ]


def check_rows(rows: Sequence[Row], lengths: Lengths) -> None:
    """Raise a ValueError that names the uid of a row that has no place in a batch.

    Raises:
        ValueError: A prompt or a response is longer than `lengths` allow, a segment has not one
            token reward for each token of its response, or routed experts are not of one shape.
    """
    shape = None
    for row in rows:
        transcript, rewards = row.segment.transcript, row.segment.token_rewards
        name = f"{row.trajectory.uid!r} member {row.trajectory.member}"
        for what, found, longest in (
            ("prompt", row.prompt, lengths.prompt),
            ("response", row.response, lengths.response),
        ):
            if found > longest:
                raise ValueError(
                    f"{name}: its {what} has {found} tokens, lengths.{what} = {longest}"
                )
        if rewards is not None and len(rewards) != transcript.response_length:
            raise ValueError(
                f"{name}: segments[{row.at}] has {len(rewards)} token_rewards; "
                f"expected {transcript.response_length}"
            )
        own, shape = transcript.expert_shape, shape or transcript.expert_shape
        if own not in (None, shape):
            raise ValueError(f"{name}: routed experts of shape {own}, other rows have {shape}")


def read_arrays(
    rows: Sequence[Row], processor: MediaProcessor | None, position_rows: int
) -> list[Arrays]:
    """The arrays of each row; all rows have the same keys.

    ``prompts`` (T - N,), ``responses``, ``response_mask``, ``rollout_log_probs``,
    ``weight_versions``, ``token_rewards`` (N,), ``input_ids`` (T,), ``position_ids`` (T,), or
    (T, position_rows) of M-RoPE families, ``routed_experts`` (T, layers, top_k).

    Args:
        rows: Of the batch.
        processor: The model's, where it reads images or videos.
        position_rows: 3, or 4 with the positions of a text-only row before them.
    """
    shapes = [row.segment.transcript.expert_shape for row in rows]
    shape = next((each for each in shapes if each is not None), None)
    has_rewards = any(row.segment.token_rewards is not None for row in rows)
    found = []
    for row in rows:
        transcript, rewards = row.segment.transcript, row.segment.token_rewards
        start, stop = row.prompt, row.prompt + row.response
        ids = np.frombuffer(transcript.ids_bytes(), dtype=np.int32)[:stop]
        positions: npt.NDArray[Any] = np.arange(stop)
        if processor is not None and processor.position_rows > 1:
            own = processor.position_ids(ids, row.media)
            positions = (own if position_rows == 3 else np.concatenate([positions[None], own])).T
        arrays = {
            "prompts": ids[:start],
            "responses": ids[start:],
            "response_mask": transcript.mask()[start:stop],
            "input_ids": ids,
            "position_ids": positions,
            "rollout_log_probs": transcript.log_probs()[start:stop],
            "weight_versions": transcript.weight_versions()[start:stop],
        }
        if has_rewards:
            arrays["token_rewards"] = (
                np.full(row.response, np.nan, dtype=np.float32)
                if rewards is None
                else np.array(rewards, dtype=np.float32)[: row.response]
            )
        if shape is not None:
            experts = transcript.routed_experts()
            if experts is None:
                experts = np.full((stop, *shape), NO_EXPERT, dtype=np.int16)
            arrays["routed_experts"] = experts[:stop]
        found.append(arrays)
    return found


def pad_rows(
    rows: Sequence[Row], arrays: Sequence[Arrays], widths: tuple[int, int], pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Rectangles: prompts padded on the left, responses on the right.

    Args:
        rows, arrays: Of the batch.
        widths: (P, R).
        pad_token_id: In padded positions of ids.
    """
    prompt, response = widths
    width = {PROMPT: prompt, RESPONSE: response, BOTH: prompt + response}
    tensors = {}
    for key, inner in _find_keys(arrays).items():
        part, dtype, filler = KEYS[key]
        shape = (len(rows), width[part], *inner)
        filler = pad_token_id if filler is None else filler
        tensor = torch.full(shape, filler, dtype=dtype, device="cpu")
        values = tensor.numpy()
        for at, (row, own) in enumerate(zip(rows, arrays, strict=True)):
            start = 0 if part is RESPONSE else prompt - row.prompt
            values[at, start : start + row.counts[part]] = own.get(key, 1)
        tensors[key] = tensor
    if tensors["position_ids"].dim() == 3:  # of an M-RoPE family: (B, 3 or 4, P + R)
        tensors["position_ids"] = tensors["position_ids"].transpose(1, 2).contiguous()
    return tensors


def pack_rows(rows: Sequence[Row], arrays: Sequence[Arrays]) -> dict[str, torch.Tensor]:
    """Jagged nested tensors: the rows one after the other, without padding.

    Keys of equal lengths share their offsets: torch then lets them be combined.
    """
    offsets = {}
    for part in (PROMPT, RESPONSE, BOTH):
        ends = np.cumsum([row.counts[part] for row in rows])
        offsets[part] = torch.tensor([0, *ends], dtype=torch.int64, device="cpu")
    tensors = {}
    for key, inner in _find_keys(arrays).items():
        part, dtype, _ = KEYS[key]
        values = torch.ones((int(offsets[part][-1]), *inner), dtype=dtype, device="cpu")
        if rows and key in arrays[0]:
            np.concatenate([own[key] for own in arrays], out=values.numpy(), casting="unsafe")
        tensors[key] = torch.nested.nested_tensor_from_jagged(values, offsets[part])
    return tensors


def _find_keys(arrays: Sequence[Arrays]) -> dict[str, tuple[int, ...]]:
    """The keys of a batch, each with the shape of one token's value."""
    first = arrays[0] if arrays else {}
    keys = [key for key in KEYS if key in first or key not in _OPTIONAL]
    return {key: first[key].shape[1:] if key in first else () for key in keys}
