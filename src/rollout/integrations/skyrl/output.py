"""Rows as a `GeneratorOutput`, and a `GeneratorInput` as prompts. Imports no SkyRL.

Written after SkyRL 0.3.0's ``skyrl/train/generators/base.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rollout.agents import agent_names
from rollout.errors import PromptError
from rollout.integrations.repeated_prompts import (
    Repeated,
    grouped,
    prompt_of_columns,
    sampling_of_trainer,
)
from rollout.integrations.row_media import features_of, refuse_others
from rollout.integrations.row_values import facts_of, known_experts, versions_of
from rollout.integrations.trainer_rows import group_means

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rollout.integrations.repeated_prompts import PromptOf
    from rollout.integrations.row_policy import RowPolicy
    from rollout.integrations.trainer_row import TrainerRow
    from rollout.media.processor import MediaProcessor
    from rollout.types import Prompt


def policy_for(policy: RowPolicy, *, step_wise: bool) -> RowPolicy:
    """SkyRL takes several rows of a trajectory in step-wise training only; else "last" of them."""
    if step_wise or policy.segments != "rows":
        return policy
    return attrs.evolve(policy, segments="last")


def prompts_of(given: Mapping[str, Any], prompt_of: PromptOf | None = None) -> Repeated:
    """The groups of a `GeneratorInput`: by `trajectory_ids`, else adjacent equal prompts.

    The columns of a prompt are its `env_extras`, with ``prompt``, ``env_class`` and
    ``agent_name``, which is the env class where an agent is registered under that name;
    ``reward_spec`` is read as ``reward_model``.

    Raises:
        PromptError, ConfigError: There are no prompts, or a column or a sampling setting is none
            of what it may be.
    """
    if not given["prompts"]:  # of which SkyRL's figures would have no minimum
        raise PromptError("prompts: no rows; expected at least one")
    sampling = sampling_of_trainer(given.get("sampling_params") or {}, "sampling_params")
    identities = given.get("trajectory_ids")
    keys: Sequence[Hashable] = (
        _adjacent(given) if identities is None else [each.instance_id for each in identities]
    )
    names = {} if identities is None else {key: str(key) for key in keys}

    def prompt_at(at: int) -> Prompt:
        return prompt_of_columns(_columns(given, at), prompt_of, sampling)

    return grouped(keys, prompt_at, names)


#: What SkyRL has fields for.
_OF_IMAGES = ("pixel_values", "image_grid_thw")


def generator_output(
    rows: Sequence[TrainerRow],
    identities: Sequence[Any] | None,
    places: Sequence[int],
    metrics: Mapping[str, float],
    *,
    step_wise: bool = False,
    zero_reward_on_non_stop: bool = False,
    apply_overlong_filtering: bool = False,
    unrewarded: str = "group_mean",
    processor: MediaProcessor | None = None,
) -> dict[str, Any]:
    """The keys of a `GeneratorOutput`, one entry a row.

    Args:
        rows: In the order of the input, those of one trajectory adjacent.
        identities: `trajectory_ids` of the input.
        places: Of each row, where its trajectory stands in the input.
        metrics: Becomes `rollout_metrics`, below ``rollout/``.
        step_wise: Whether a trajectory may have several rows.
        zero_reward_on_non_stop, apply_overlong_filtering: As SkyRL's settings of these names.
        unrewarded: As `RowPolicy.unrewarded`.
        processor: The model's, for `pixel_values` and `image_grid_thw` of rows with images.

    Raises:
        RolloutError: A row has media that SkyRL has no field for.
    """
    features = [_features(row, processor) for row in rows]
    has_images = any(features)
    experts = [known_experts(row) for row in rows]
    is_cut = [row.stop_reason != "stop" for row in rows]
    masks = [row.mask.astype(int).tolist() for row in rows]
    if zero_reward_on_non_stop:
        rows = [
            attrs.evolve(row, reward=0.0) if cut and row.is_rewarded else row
            for row, cut in zip(rows, is_cut, strict=True)
        ]
    rewards = [row.reward for row in rows]
    if unrewarded == "group_mean":
        # Again, of the rewards that SkyRL looks at: those of last rows, some of which are 0 now.
        means = group_means(row for row in rows if row.is_last)
        rewards = [row.reward if row.is_rewarded else means.get(row.group, 0.0) for row in rows]
    if apply_overlong_filtering:
        masks = [[0] * len(m) if cut else m for m, cut in zip(masks, is_cut, strict=True)]
    return {
        "prompt_token_ids": [row.prompt_ids.tolist() for row in rows],
        "response_ids": [row.response_ids.tolist() for row in rows],
        "rewards": [float(reward) for reward in rewards],
        "loss_masks": masks,
        "stop_reasons": [row.stop_reason for row in rows],
        "rollout_metrics": {f"rollout/{name}": value for name, value in metrics.items()},
        "rollout_logprobs": [row.log_probs.tolist() for row in rows],
        "trajectory_ids": None if identities is None else [identities[at] for at in places],
        "trajectory_generation_times": [row.trajectory.metrics.get("total_s", 0.0) for row in rows],
        # Nested lists: SkyRL asks for the truth of each of them.
        "rollout_expert_indices": None
        if all(each is None for each in experts)
        else [[] if each is None else each.astype(np.int32).tolist() for each in experts],
        "is_last_step": [row.is_last for row in rows] if step_wise else None,
        "env_metrics": [_env_metrics(row) for row in rows],
        **{
            name: [each.get(name) for each in features] if has_images else None
            for name in _OF_IMAGES
        },
    }


def _features(row: TrainerRow, processor: MediaProcessor | None) -> dict[str, Any]:
    features = features_of(row, processor)
    refuse_others(features, _OF_IMAGES, row, "SkyRL")
    return features or {}


def _env_metrics(row: TrainerRow) -> dict[str, Any]:
    """What SkyRL keeps of a row beside its tokens."""
    trajectory = row.trajectory
    return {
        **facts_of(row),
        "outcome": str(trajectory.outcome),
        "reason": trajectory.reason,
        "purpose": row.purpose,
        "weight_versions": versions_of(row),
        "tool_rewards": list(trajectory.tool_rewards),
        "turn_scores": list(trajectory.turn_scores),
    }


def _columns(given: Mapping[str, Any], at: int) -> dict[str, Any]:
    extras = given.get("env_extras")
    columns: dict[str, Any] = dict(extras[at] or {}) if extras else {}
    env_class = given["env_classes"][at] if given.get("env_classes") else None
    if env_class in agent_names():
        columns.setdefault("agent_name", env_class)
    spec = columns.pop("reward_spec", None)
    if isinstance(spec, Mapping):
        columns.setdefault("reward_model", spec)
    elif spec is not None:
        columns["reward_spec"] = spec
    return {**columns, "env_class": env_class, "messages": [*given["prompts"][at]]}


def _adjacent(given: Mapping[str, Any]) -> list[int]:
    """A number for each prompt; equal ones that follow each other share it."""
    keys: list[int] = []
    last = None
    for at in range(len(given["prompts"])):
        said = json.dumps(_columns(given, at), sort_keys=True, default=repr)
        keys.append(keys[-1] + (said != last) if keys else 0)
        last = said
    return keys
