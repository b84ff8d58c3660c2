"""A gateway for agents that verifiers runs."""

from __future__ import annotations

import os
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs

from rollout.gateway.serving import open_trajectory_server
from rollout.runtime.runtime import RolloutRuntime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.config import RolloutConfig

#: Environment variable that holds the token of trainers, here and at ``rollout serve-gateway``.
TOKEN_VARIABLE = "ROLLOUT_GATEWAY_TOKEN"


@attrs.frozen(kw_only=True)
class Door:
    """Where a gateway opens trajectories.

    Attributes:
        url: Its base URL.
        token: What it wants to be shown.
        runtime: Where the trajectories run: `update_weights` and the like are called there.
    """

    url: str
    token: str
    runtime: RolloutRuntime


@asynccontextmanager
async def open_door(config: RolloutConfig, *, token: str | None = None) -> AsyncIterator[Door]:
    """A runtime with a gateway, on this loop; ``rollout serve-gateway`` is one in its own process.

    Leaving the block ends the trajectories that still run.

    Args:
        config: Of engines and limits; its agent and its tools are not used.
        token: None takes that of ``ROLLOUT_GATEWAY_TOKEN``, else a fresh one.

    Raises:
        RolloutError: As `open_rollout` and `open_gateway`.
    """
    shown = token or os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
    async with open_trajectory_server(config, shown) as (runtime, gateway):
        yield Door(url=gateway.url, token=shown, runtime=runtime)
