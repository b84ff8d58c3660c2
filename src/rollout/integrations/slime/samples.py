"""Rows as slime's samples, and its samples as prompts. Imports no slime.

Written after slime 0.3.1's ``slime/utils/types.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollout.errors import PromptError
from rollout.integrations.prompt_media import with_media
from rollout.integrations.repeated_prompts import (
    Repeated,
    grouped,
    prompt_of_columns,
    sampling_of_trainer,
)
from rollout.integrations.row_media import features_of, images_of, media_of, videos_of
from rollout.integrations.row_values import facts_of, known_experts, runs_of, versions_of
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.integrations.adapter import PlacedRows
    from rollout.integrations.repeated_prompts import PromptOf
    from rollout.integrations.trainer_row import TrainerRow
    from rollout.media.processor import MediaProcessor
    from rollout.types import Prompt

#: Names of `Sample.Status`, by what became of the trajectory.
STATUS: Mapping[Outcome, str] = {
    Outcome.COMPLETED: "COMPLETED",
    Outcome.LENGTH: "TRUNCATED",
    Outcome.LIMIT: "TRUNCATED",
    Outcome.DEADLINE: "TRUNCATED",
    Outcome.CANCELLED: "ABORTED",
    Outcome.FAILED: "FAILED",
    Outcome.REJECTED: "FAILED",
}
#: Where a sample's `metadata` says what its trajectory was.
METADATA = "rollout"

Decode = Callable[[Sequence[int]], str]


def prompts_of(
    samples: Sequence[Any], sampling: Mapping[str, Any], prompt_of: PromptOf | None = None
) -> Repeated:
    """slime's samples as groups, by their `group_index`.

    The columns of a prompt are the sample's `metadata`, with its ``prompt`` (a text that a user
    says, or messages) and its `label` as ``ground_truth``.

    Args:
        samples: That have not been generated.
        sampling: slime's settings.
        prompt_of: Makes a prompt of columns; None reads those of a prompts file.

    Raises:
        PromptError, ConfigError: A column or a setting is none of what it may be.
    """
    translated = sampling_of_trainer(sampling, "sampling_params")
    keys = [
        ("index", at) if sample.group_index is None else ("group", sample.group_index)
        for at, sample in enumerate(samples)
    ]

    def prompt_at(at: int) -> Prompt:
        return prompt_of_columns(_columns(samples[at]), prompt_of, translated)

    return grouped(keys, prompt_at, {key: f"{key[0]}-{key[1]}" for key in keys})


def fill(
    sample: Any,
    row: TrainerRow,
    decode: Decode,
    *,
    keeps_reward: bool = True,
    processor: MediaProcessor | None = None,
) -> Any:
    """A copy of `sample` with the tokens of a row; its log-probs, mask, versions and reward.

    Tokens that nothing may be learned from have mask 0, and where none is left `remove_sample`
    is set.

    Args:
        sample: As slime's data source made it.
        row: One segment.
        decode: Ids to text.
        keeps_reward: Whether a row without a reward of its own has the policy's; else it has None,
            since slime gives rewards.
        processor: The model's, for `multimodal_train_inputs` of rows with images or videos.
    """
    filled = copy.copy(sample)
    media_of_sample = ("multimodal_inputs", "multimodal_train_inputs")
    shown = {name: getattr(sample, name, None) for name in media_of_sample}
    for name in shown:  # of pictures no copies
        setattr(filled, name, None)
    filled = copy.deepcopy(filled)
    for name, value in shown.items():
        setattr(filled, name, value)
    filled.tokens = row.prompt_ids.tolist()
    filled.response, filled.response_length = "", 0
    filled.loss_mask, filled.rollout_log_probs = None, None
    for start, stop, sampled in runs_of(row.sampled):
        filled.append_response_tokens(
            tokens=row.response_ids[start:stop].tolist(),
            log_probs=row.log_probs[start:stop].tolist() if sampled else None,
            trainable=sampled,
        )
    filled.response = decode(row.response_ids.tolist())
    filled.loss_mask = row.mask.astype(int).tolist()
    filled.remove_sample = not row.mask.any()
    filled.weight_versions = [str(version) for version in versions_of(row)]
    filled.rollout_routed_experts = _experts(row)
    if row.media:
        media = media_of(row)
        filled.multimodal_inputs = {"images": images_of(media), "videos": videos_of(media)}
        filled.multimodal_train_inputs = features_of(row, processor)
    is_given = row.is_rewarded or keeps_reward
    filled.reward = float(row.reward) if is_given else None
    filled.status = type(sample).Status[STATUS[row.trajectory.outcome]]
    filled.non_generation_time = row.trajectory.metrics.get("tool_s", 0.0)
    filled.metadata = {**(sample.metadata or {}), METADATA: _about(row)}
    return filled


def samples_of(
    samples: Sequence[Any],
    placed: PlacedRows,
    decode: Decode,
    *,
    keeps_reward: bool = True,
    processor: MediaProcessor | None = None,
) -> list[list[Any]]:
    """Of each sample its rows, in the order of the samples; those of one share a `rollout_id`."""
    found: list[list[Any]] = [[] for _ in samples]
    for row, place in zip(placed.rows, placed.places, strict=True):
        filled = fill(samples[place], row, decode, keeps_reward=keeps_reward, processor=processor)
        found[place].append(filled)
    for sample, rows in zip(samples, found, strict=True):
        for each in rows:
            each.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
    return found


def groups_of(samples: Sequence[Any], found: Sequence[list[Any]]) -> list[list[Any]]:
    """slime's groups: of samples; where any has several rows, of lists of samples, all of them."""
    is_flat = all(len(rows) == 1 for rows in found)
    groups: dict[Any, list[Any]] = {}
    for at, (sample, rows) in enumerate(zip(samples, found, strict=True)):
        key = ("alone", at) if sample.group_index is None else sample.group_index
        groups.setdefault(key, []).append(rows[0] if is_flat else rows)
    return list(groups.values())


def _experts(row: TrainerRow) -> torch.Tensor | None:
    """(T - 1, layers, top_k) int32 ≥ 0: of the last token nothing has been computed."""
    experts = known_experts(row)
    return None if experts is None else torch.from_numpy(experts[:-1].astype(np.int32))


def _about(row: TrainerRow) -> dict[str, Any]:
    trajectory = row.trajectory
    return {
        **facts_of(row),
        "uid": trajectory.uid,
        "outcome": str(trajectory.outcome),
        "reason": trajectory.reason,
        "purpose": row.purpose,
    }


def _columns(sample: Any) -> dict[str, Any]:
    columns = {name: value for name, value in (sample.metadata or {}).items() if name != METADATA}
    tools = columns.get("tools")
    if tools and not all(isinstance(name, str) for name in tools):  # slime's are schemas
        columns["tool_schemas"] = columns.pop("tools")
    if sample.label is not None:
        columns.setdefault("ground_truth", sample.label)
    return {**columns, "prompt": _shown(sample)}


def _shown(sample: Any) -> Any:
    """A sample's prompt with its images and videos where they stand, or before its text."""
    held = getattr(sample, "multimodal_inputs", None) or {}
    given = {kind: list(held.get(f"{kind}s") or ()) for kind in ("image", "video")}
    if held.get("audio") or held.get("audios"):
        raise PromptError("multimodal_inputs: audio is not supported; images and videos are")
    return with_media(sample.prompt, given["image"], given["video"])
