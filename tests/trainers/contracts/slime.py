"""slime 0.3.1 (github.com/THUDM/slime, commit 624b824a): ``slime/utils/types.py``,
``slime/rollout/base_types.py``, `validate_rollout_id_annotated` and
`validate_rollout_routed_experts_for_replay` of ``slime/observability/rollout_data_utils.py``, and
what `_convert_samples_to_train_data` of ``slime/ray/rollout.py`` takes for granted.

slime is on no package registry under that name.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """The fields of slime's sample that an adapter reads or writes."""

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    non_generation_time: float = 0.0

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None,
        trainable: bool,
    ) -> None:
        """Generated tokens need log-probs, others must have none."""
        assert (log_probs is not None) == trainable
        assert log_probs is None or len(log_probs) == len(tokens)
        self.tokens += tokens
        self.response_length += len(tokens)
        self.loss_mask = [*(self.loss_mask or []), *[int(trainable)] * len(tokens)]
        new = [0.0] * len(tokens) if log_probs is None else log_probs
        self.rollout_log_probs = [*(self.rollout_log_probs or []), *new]


def check(groups: list[Any], num_layers: int, top_k: int) -> None:
    """What slime asks of the groups of a rollout."""
    depths = {_check_node(node, 0) for node in groups}
    assert len(depths) == 1, "slime flattens as deep as the first group is"
    for sample in flat(groups):
        count = sample.response_length
        assert len(sample.tokens) > count > 0
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == count
        assert sample.reward is not None
        assert sample.reward == sample.reward
        assert sample.status is not type(sample).Status.PENDING
        assert all(isinstance(version, str) for version in sample.weight_versions)
        experts = sample.rollout_routed_experts
        if experts is not None:
            assert tuple(experts.shape) == (len(sample.tokens) - 1, num_layers, top_k)
            assert int(experts.min()) >= 0


def _check_node(node: Any, depth: int) -> int:
    """Samples of one rollout, a list below the groups, share a `rollout_id`."""
    if not isinstance(node, list):
        return depth
    if depth and len(node) > 1:
        named = {sample.rollout_id for sample in node}
        assert len(named) == 1
        assert None not in named
    return max(_check_node(each, depth + 1) for each in node)


def flat(node: Any) -> list[Any]:
    """All samples, in order."""
    return [sample for each in node for sample in flat(each)] if isinstance(node, list) else [node]
