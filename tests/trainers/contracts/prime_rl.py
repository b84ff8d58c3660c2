"""prime-rl (github.com/PrimeIntellect-ai/prime-rl, commit 559b4477):
`TrainingSample` and `RoutedExperts` of ``src/prime_rl/transports/rollouts/types.py``.

prime-rl is on no package registry.
"""

from __future__ import annotations

from typing import Any

import msgspec


class RoutedExperts(msgspec.Struct, array_like=True):
    """Bytes of an array ``[seq_len, layers, topk]``."""

    data: bytes
    shape: list[int]
    dtype: str


class TrainingSample(msgspec.Struct, array_like=True):
    """The fields that an adapter writes, in the order of prime-rl's."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    mm_kwargs: None = None
    routed_experts: RoutedExperts | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None


def check(samples: list[Any], sample_type: Any) -> None:
    """Arrays as long as the tokens; each can be sent and read again by its type."""
    for sample in samples:
        count = len(sample.token_ids)
        assert any(sample.mask)
        for values in (sample.mask, sample.logprobs, sample.temperatures, sample.advantages):
            assert len(values) == count
        if sample.routed_experts is not None:
            assert sample.routed_experts.shape[0] == count
        wire = msgspec.msgpack.encode(sample)
        assert msgspec.msgpack.decode(wire, type=sample_type) == sample
