"""From a configuration to running engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.config import (
    CustomEngine,
    InProcessPlacement,
    LocalProcessPlacement,
    RolloutConfig,
    SimulatedEngine,
    TransformersEngine,
)
from rollout.engine.model_files import model_path_fault
from rollout.engine.placement.base import CoreSpec, Placement
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.local_process import LocalProcess
from rollout.engine.pool import EnginePool, open_pool
from rollout.engine.routing import Router
from rollout.errors import EngineError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager


def core_spec(config: RolloutConfig, replica: int) -> CoreSpec:
    """Which core serves this configuration, with its arguments for one replica.

    Raises:
        EngineError: This installation has no core for it, or the model's path leads nowhere.
    """
    engine, model = config.engine, config.model
    match engine:
        case TransformersEngine():
            fault = model_path_fault(model.path)
            if fault:
                raise EngineError(fault)
            return CoreSpec(
                "rollout.engine.cores.transformers:TransformersCore",
                {
                    "model": model.path,
                    "revision": model.revision,
                    "trust_remote_code": model.trust_remote_code,
                    "dtype": engine.dtype,
                    "device": engine.device,
                    "threads": engine.threads,
                    "max_running": engine.max_running,
                    "max_queued": engine.max_queued,
                    "context_length": engine.context_length,
                    "stream_interval": engine.stream_interval,
                },
            )
        case SimulatedEngine():
            options = {"stream_interval": engine.stream_interval, "replica": replica}
            return CoreSpec(
                "rollout.testing.simulated:SimulatedCore", {**options, **engine.scenario}
            )
        case CustomEngine():
            return CoreSpec(engine.core, dict(engine.options))
    raise EngineError(
        f"engine.kind = {engine.kind!r}: this version has no core for it; "
        "transformers, simulated and custom can be opened"
    )


def placement_of(config: RolloutConfig) -> Placement:
    """Where the engines of this configuration live.

    Raises:
        EngineError: This version cannot place engines there.
    """
    match config.placement:
        case InProcessPlacement():
            return InProcess()
        case LocalProcessPlacement(python=python):
            return LocalProcess(python=python)
    raise EngineError(
        f"placement.kind = {config.placement.kind!r}: this version cannot place engines there; "
        "in_process and local_process can be used"
    )


def open_engines(config: RolloutConfig) -> AbstractAsyncContextManager[EnginePool]:
    """The engines of a configuration, all serving; none is left when the block has been left.

    Raises:
        EngineError: One of them did not start, with what it said.
    """
    return open_pool(
        EnginePool(
            placement=placement_of(config),
            specs=[core_spec(config, replica) for replica in range(config.engine.replicas)],
            router=Router(
                strategy=config.router.strategy,
                move_margin=config.router.move_margin,
                move_margin_s=config.router.move_margin_s,
            ),
            start_timeout_s=config.engine.start_timeout_s,
            weights=config.router.weights,
        )
    )
