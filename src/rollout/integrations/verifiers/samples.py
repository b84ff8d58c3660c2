"""Rows as prime-rl's training samples. Imports no prime-rl before it is called.

Written after ``src/prime_rl/transports/rollouts/types.py`` of prime-rl, commit 559b4477.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.integrations.row_media import features_of
from rollout.integrations.row_values import known_experts

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from rollout.integrations.trainer_row import TrainerRow
    from rollout.media.processor import MediaProcessor

_TYPES = "prime_rl.transports.rollouts.types"
#: More experts than these do not fit in a byte.
_BYTE = 256


def training_samples(
    rows: Sequence[TrainerRow],
    *,
    env_name: str,
    temperature: float = 1.0,
    advantages: Sequence[float] | None = None,
    types: Any = None,
    processor: MediaProcessor | None = None,
) -> list[Any]:
    """One `TrainingSample` a row that something can be learned from, in their order.

    The mask, the log-probs, the temperature and the advantage are given for each token of prompt
    and response. A sample has no field for weight versions, rewards and stop reasons: rewards
    count as advantages.

    Args:
        rows: Of whole groups.
        env_name: What prime-rl calls the environment.
        temperature: Of the sampling.
        advantages: One for each row; None: its reward less the mean of its group's trajectories.
        types: The module with `TrainingSample` and `RoutedExperts`; None imports prime-rl's.
        processor: The model's, for `mm_kwargs` and `mm_token_type_ids` of rows with media.
    """
    home = importlib.import_module(_TYPES) if types is None else types
    given = _group_advantages(rows) if advantages is None else advantages
    return [
        _sample(home, row, env_name, temperature, advantage, processor)
        for row, advantage in zip(rows, given, strict=True)
        if row.mask.any()
    ]


def _sample(
    home: Any,
    row: TrainerRow,
    env_name: str,
    temperature: float,
    advantage: float,
    processor: MediaProcessor | None,
) -> Any:
    begin = len(row.prompt_ids)
    count = begin + len(row.response_ids)
    off = np.zeros(begin)
    return home.TrainingSample(
        token_ids=[*row.prompt_ids.tolist(), *row.response_ids.tolist()],
        mask=[False] * begin + row.mask.tolist(),
        logprobs=[*off.tolist(), *row.log_probs.astype(float).tolist()],
        temperatures=[temperature] * count,
        env_name=env_name,
        advantages=[*off.tolist(), *(row.mask * float(advantage)).tolist()],
        routed_experts=_experts(home, row),
        **_multi_modal(home, row, processor),
    )


def _multi_modal(home: Any, row: TrainerRow, processor: MediaProcessor | None) -> dict[str, Any]:
    """The tensors of a row's media, and which ids are their placeholders: 1 images, 2 videos."""
    features = features_of(row, processor)
    if features is None or processor is None:
        return {}
    arrays = {name: np.ascontiguousarray(value) for name, value in features.items()}
    ids = np.concatenate([row.prompt_ids, row.response_ids])
    return {
        "mm_kwargs": {
            name: home.EncodedTensor(
                data=value.tobytes(), shape=list(value.shape), dtype=str(value.dtype)
            )
            for name, value in arrays.items()
        },
        "mm_token_type_ids": processor.kinds_of_ids(ids, row.media).tolist(),
    }


def _experts(home: Any, row: TrainerRow) -> Any:
    experts = known_experts(row)
    if experts is None:
        return None
    packed = experts.astype(np.uint8 if experts.max(initial=0) < _BYTE else np.int16)
    return home.RoutedExperts(
        data=packed.tobytes(), shape=list(packed.shape), dtype=str(packed.dtype)
    )


def _group_advantages(rows: Sequence[TrainerRow]) -> list[float]:
    """Rewards less the mean of their groups, in which each trajectory counts once."""
    known: dict[Hashable, dict[int, float]] = {}
    for row in rows:
        if row.is_rewarded and row.is_trainable:
            known.setdefault(row.group, {}).setdefault(id(row.trajectory), row.reward)
    means = {name: math.fsum(own.values()) / len(own) for name, own in known.items()}
    return [row.reward - means.get(row.group, row.reward) for row in rows]
