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
    from rollout.runtime.runtime import RolloutRuntime


@asynccontextmanager
async def open_trajectory_server(config: RolloutConfig, token: str) -> AsyncIterator[Gateway]:
    """A runtime of its own with a gateway where trajectories are opened over HTTP too.

    Args:
        token: What trainers show; their agents get a key for each trajectory.

    Raises:
        RolloutError: As `open_rollout` and `open_gateway`.
    """
    async with (
        open_rollout(own_config(config)) as runtime,
        serve_runtime(runtime, token) as gateway,
    ):
        yield gateway


def own_config(config: RolloutConfig) -> RolloutConfig:
    """With a gateway that does not take the address before `serve_runtime` does."""
    return attrs.evolve(config, gateway=attrs.evolve(config.gateway, start="when_needed"))


@asynccontextmanager
async def serve_runtime(runtime: RolloutRuntime, token: str) -> AsyncIterator[Gateway]:
    """A gateway of a runtime, where trajectories are opened over HTTP; leaving ends them.

    Args:
        runtime: Opened with `own_config`.
        token: As for `open_trajectory_server`.

    Raises:
        ConfigError: As `open_gateway`.
    """
    limits = exchange_limits(runtime.config.gateway)
    async with open_task_group() as tasks:
        desk = Desk(runtime, tasks)

        def more_routes(loop: RuntimeLoop) -> list[tuple[str, Application]]:
            return TrajectoryRoutes(desk, loop, limits, token).table()

        async with serve_trajectories(runtime.services, more_routes) as gateway:
            yield gateway
