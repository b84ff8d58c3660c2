"""A runtime as a server: trainers open trajectories over HTTP, and agents reach them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs

from rollout.gateway.gateway import exchange_limits, serve_trajectories
from rollout.gateway.served_trajectories import Desk
from rollout.gateway.trajectory_routes import TrajectoryRoutes
from rollout.runtime.opening import open_rollout
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.config import RolloutConfig
    from rollout.gateway.asgi import Application
    from rollout.gateway.gateway import Gateway
    from rollout.gateway.runtime_loop import RuntimeLoop


@asynccontextmanager
async def open_trajectory_server(config: RolloutConfig, token: str) -> AsyncIterator[Gateway]:
    """A runtime of its own with a gateway where trajectories are opened over HTTP too.

    Args:
        token: What trainers show; their agents get a key for each trajectory.

    Raises:
        RolloutError: As `open_rollout` and `open_gateway`.
    """
    # The runtime's own gateway would take the address.
    when_needed = attrs.evolve(config.gateway, start="when_needed")
    own = attrs.evolve(config, gateway=when_needed)
    async with open_rollout(own) as runtime, open_task_group() as tasks:
        desk = Desk(runtime, tasks)

        def more_routes(loop: RuntimeLoop) -> list[tuple[str, Application]]:
            limits = exchange_limits(config.gateway)
            return TrajectoryRoutes(desk, loop, limits, token).table()

        async with serve_trajectories(runtime.services, more_routes) as gateway:
            yield gateway
