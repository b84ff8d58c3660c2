"""A batch as plain data: every row with its tokens, bit by bit."""

from __future__ import annotations

import base64
import zlib
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from rollout import RolloutBatch

    Array = npt.NDArray[np.generic]

Row = dict[str, Any]


def call_of(name: str, batch: RolloutBatch, error: BaseException | None = None) -> dict[str, Any]:
    """What a call returned.

    Token ids are text: id n is the character with the number n. Masks and weight versions are runs
    `[value, count]` over the response; log-probs and rewards of tokens are packed float32.
    """
    tensors = {key: _parts_of(batch.tensors[key]) for key in sorted(batch.tensors.keys())}
    causes = {(t.uid, t.member): t.cause for t in batch.trajectories}
    is_padded = not batch.tensors["prompts"].is_nested
    rows = []
    for at, sample in enumerate(batch.samples):
        row = _row_of(sample, {key: parts[at] for key, parts in tensors.items()}, is_padded)
        cause = causes.get((sample.uid, sample.member))
        if cause is not None:  # its type alone: what errors say may be worded better
            row["cause"] = cause.type
        rows.append(row)
    called: dict[str, Any] = {
        "call": name,
        "rows": rows,
        "tensors": {
            key: f"{_type_and_shape(batch.tensors[key])} {_checksum(parts)}"
            for key, parts in tensors.items()
        },
    }
    if error is not None:
        called["error"] = type(error).__name__
    return called


def _row_of(sample: Any, tensors: dict[str, Array], is_padded: bool) -> Row:
    prompt, response = tensors["prompts"], tensors["responses"]
    if is_padded:
        is_token = tensors["attention_mask"].astype(bool)
        prompt, response = prompt[is_token[: len(prompt)]], response[is_token[len(prompt) :]]
    count = len(response)
    mask = tensors["response_mask"][:count]
    row: Row = {
        "row": f"{sample.uid}/{sample.member} segment {sample.segment}",
        "group": sample.group,
        "purpose": sample.purpose,
        "parent": None if sample.parent is None else list(sample.parent),
        "outcome": str(sample.outcome),
        "reason": sample.reason,
        "limit_source": sample.limit_source,
        "trainable": [sample.trainable, bool(tensors["trainable"])],
        "reward": sample.reward,
        "turn_scores": sample.turn_scores,
        "tool_rewards": sample.tool_rewards,
        "num_turns": sample.num_turns,
        "seeds": sample.seeds,
        "extra": sample.extra,
        "prompt": "".join(map(chr, prompt.tolist())),
        "response": "".join(map(chr, response.tolist())),
        "mask": _runs(mask.tolist()),
        "versions": _runs(tensors["weight_versions"][:count].tolist()),
        "log_probs": _packed(tensors["rollout_log_probs"][:count][mask.astype(bool)]),
    }
    if "token_rewards" in tensors:
        row["token_rewards"] = _packed(tensors["token_rewards"][:count])
    return row


def _parts_of(tensor: torch.Tensor) -> list[Array]:
    """One for each row."""
    if tensor.is_nested:
        return [part.numpy() for part in tensor.unbind()]
    return list(tensor.numpy())


def _runs(values: Sequence[int]) -> list[list[int]]:
    return [[value, sum(1 for _ in run)] for value, run in groupby(values)]


def _packed(values: Array) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _type_and_shape(tensor: torch.Tensor) -> str:
    shape = "jagged" if tensor.is_nested else str(list(tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def _checksum(parts: list[Array]) -> str:
    """Of everything, padding too."""
    return f"{zlib.crc32(b''.join(part.tobytes() for part in parts)):08x}"
