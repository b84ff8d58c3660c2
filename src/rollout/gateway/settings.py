"""What a gateway allows, and how it matches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    from rollout.config import GatewayConfig


@attrs.frozen(kw_only=True)
class GatewaySettings:
    """The part of the `gateway` section that trajectories are served by."""

    #: What clients call the model.
    model: str = "rollout"
    #: Requests of a trajectory that generate; None allows any number.
    max_calls: int | None = 1024
    #: Rows of a trajectory beside the main one; None allows any number.
    max_branches: int | None = 256
    #: Requests of a trajectory that generate at once.
    max_concurrent_calls: int = 64
    #: Of a turn that comes back without its reasoning: "accept" continues the row that holds it,
    #: "fork" begins another one.
    dropped_reasoning: Literal["accept", "fork"] = "accept"
    #: Of a client's sampling: see `GatewayConfig.sampling`.
    sampling: Literal["accept", "pin", "refuse"] = "accept"
    #: Whether side calls are trained on.
    train_side_calls: bool = False

    @classmethod
    def of(cls, config: GatewayConfig) -> GatewaySettings:
        """The part that a section of the configuration has."""
        return cls(
            model=config.model,
            max_calls=config.max_calls,
            max_branches=config.max_branches,
            max_concurrent_calls=config.max_concurrent_calls,
            dropped_reasoning=config.dropped_reasoning,
            sampling=config.sampling,
            train_side_calls=config.train_side_calls,
        )
