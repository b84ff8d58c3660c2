"""Columns of a batch, one array a row, and how they become tensors: rectangles, or end to end.

Shapes: B rows, P prompt width, R response width; of a row T tokens, N of them in the response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rollout.chat.transcript import NO_EXPERT, NO_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.chat.trajectory import Segment
    from rollout.chat.transcript import Transcript
    from rollout.media.processor import MediaProcessor
    from rollout.medium import PlacedMedia

#: The arrays of all rows by the names that they have in `RolloutBatch.tensors`.
Columns = dict[str, list[npt.NDArray[Any]]]

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


class Lengths(Protocol):
    """The widths of the tensors in tokens; `rollout.LengthsConfig` has them."""

    @property
    def prompt(self) -> int:
        """P."""

    @property
    def response(self) -> int:
        """R."""


def count_tokens(transcript: Transcript) -> tuple[int, int]:
    """Tokens of the prompt, and of the response up to the last generated one."""
    response = transcript.response_length - transcript.trailing_observation_length
    return transcript.prompt_length, response


def find_media(transcript: Transcript) -> list[PlacedMedia]:
    """The media among the tokens of a row."""
    stop = sum(count_tokens(transcript))
    return [each for each in transcript.media if each.start + each.count <= stop]


def read_columns(
    segments: Sequence[Segment], processor: MediaProcessor | None, position_rows: int
) -> Columns:
    """Read the arrays of rows out of their segments.

    ``prompts`` (T - N,), ``responses``, ``response_mask``, ``rollout_log_probs``,
    ``weight_versions``, ``token_rewards`` (N,), ``input_ids``, ``attention_mask`` (T,),
    ``position_ids`` (T,), or (T, position_rows) of M-RoPE families, ``routed_experts``
    (T, layers, top_k). Those of token rewards and experts are there only where a row has some.

    Args:
        segments: One for each row.
        processor: The model's, where it reads images or videos.
        position_rows: 3, or 4 with the positions of a text-only row before them.
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


def pad_columns(
    columns: Columns, widths: tuple[int, int], pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Make rectangles: prompts padded on the left, responses on the right.

    Args:
        columns: Of the batch.
        widths: (P, R).
        pad_token_id: In padded positions of ids.
    """
    prompt, response = widths
    width = {PROMPT: prompt, RESPONSE: response, BOTH: prompt + response}
    starts = [prompt - len(ids) for ids in columns["prompts"]]
    tensors = {}
    for key, rows in columns.items():
        part, dtype, filler = KEYS[key]
        shape = (len(rows), width[part], *_find_inner(rows))
        filler = pad_token_id if filler is None else filler
        tensor = torch.full(shape, filler, dtype=dtype, device="cpu")
        padded = tensor.numpy()
        for at, values in enumerate(rows):
            start = 0 if part is RESPONSE else starts[at]
            padded[at, start : start + len(values)] = values
        tensors[key] = tensor
    if tensors["position_ids"].dim() == 3:  # of an M-RoPE family: (B, 3 or 4, P + R)
        tensors["position_ids"] = tensors["position_ids"].transpose(1, 2).contiguous()
    return tensors


def pack_columns(columns: Columns) -> dict[str, torch.Tensor]:
    """Make jagged nested tensors: the rows one after the other, without padding.

    Keys of equal lengths share their offsets: torch then lets them be combined.
    """
    offsets, tensors = {}, {}
    for key, rows in columns.items():
        part, dtype, _ = KEYS[key]
        if part not in offsets:
            ends = np.cumsum([len(values) for values in rows])
            offsets[part] = torch.tensor([0, *ends], dtype=torch.int64, device="cpu")
        shape = (int(offsets[part][-1]), *_find_inner(rows))
        packed = torch.empty(shape, dtype=dtype, device="cpu")
        if rows:
            np.concatenate(rows, out=packed.numpy(), casting="unsafe")
        tensors[key] = torch.nested.nested_tensor_from_jagged(packed, offsets[part])
    return tensors


def _find_inner(rows: Sequence[npt.NDArray[Any]]) -> tuple[int, ...]:
    """The shape of one token's value."""
    return rows[0].shape[1:] if rows else ()
