"""From a configuration to running engines."""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from rollout.config import (
    CustomEngine,
    HttpEngine,
    InProcessPlacement,
    LocalProcessPlacement,
    RayPlacement,
    RolloutConfig,
    SGLangEngine,
    SimulatedEngine,
    TransformersEngine,
)
from rollout.config.engines import SGLANG_OWN
from rollout.config.placements import gpus_of
from rollout.engine.driver.pool import EnginePool, open_pool
from rollout.engine.driver.request_runner import last_answer_s
from rollout.engine.model_files import model_path_fault
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.local_process import LocalProcess
from rollout.engine.placement.placement import CoreSpec, Placement
from rollout.engine.placement.ray import open_ray_actors
from rollout.engine.routing import Router
from rollout.engine.wire.protocol import Terms
from rollout.engine.wire.tls import TlsFiles
from rollout.errors import EngineError
from rollout.function_refs import refuse_while_imported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.driver.replica_supervisor import FactsGiver
    from rollout.observe.event_stream import EventStream


def core_spec(config: RolloutConfig, replica: int) -> CoreSpec:
    """Which core serves this configuration, with its arguments for one replica, by its slot.

    Raises:
        EngineError: This installation has no core for it, the model's path leads nowhere, or each
            of `engine.urls` has a replica.
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
                    # They share a machine: each replica takes the next GPU of it.
                    "gpu": replica if isinstance(config.placement, LocalProcessPlacement) else 0,
                },
            )
        case SimulatedEngine():
            options = {
                "stream_interval": engine.stream_interval,
                "stream_interval_s": config.channel.stream_interval_s,
                "replica": replica,
                "routed_experts": engine.routed_experts,
            }
            return CoreSpec(
                "rollout.engine.cores.simulated.simulated_core:SimulatedCore",
                {**options, **engine.scenario},
            )
        case SGLangEngine():
            return CoreSpec(
                "rollout.engine.cores.sglang:SGLangCore", _sglang_options(config, engine, replica)
            )
        case HttpEngine():
            return CoreSpec(
                "rollout.engine.cores.http:HttpCore", _http_options(config, engine, replica)
            )
        case CustomEngine():
            return CoreSpec(engine.core, dict(engine.options))
    raise EngineError(f"engine.kind = {engine.kind!r}: this version has no core for it")


def _sglang_options(config: RolloutConfig, engine: SGLangEngine, replica: int) -> dict[str, Any]:
    model = config.model
    fault = model_path_fault(model.path)
    if fault:
        raise EngineError(fault)
    server_args = dict(engine.server_args)
    own = sorted(SGLANG_OWN & server_args.keys())
    if replica > 0 and own:  # it was added; a configuration with several is refused
        raise EngineError(
            f"engine.server_args.{own[0]} = {server_args[own[0]]!r}: expected none for a second "
            "replica: each needs its own"
        )
    if engine.device == "cuda" and isinstance(config.placement, LocalProcessPlacement):
        # They share a machine: each replica takes the next GPUs of it.
        server_args.setdefault("base_gpu_id", replica * engine.tensor_parallel)
    shares_gpus = isinstance(config.placement, RayPlacement) and bool(config.placement.colocate)
    if engine.device == "cuda" and (engine.sleep_between_batches or shares_gpus):
        server_args.setdefault("enable_memory_saver", True)
    return {
        "model": model.path,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "dtype": engine.dtype,
        "device": engine.device,
        "threads": engine.threads,
        "tensor_parallel": engine.tensor_parallel,
        "memory_fraction": engine.memory_fraction,
        "max_running": engine.max_running,
        "max_queued": engine.max_queued,
        "context_length": engine.context_length,
        "stream_interval": engine.stream_interval,
        "deterministic": engine.deterministic,
        "routed_experts": engine.routed_experts,
        "server_args": server_args,
    }


def _http_options(config: RolloutConfig, engine: HttpEngine, replica: int) -> dict[str, Any]:
    if replica >= len(engine.urls):
        raise EngineError(
            f"engine.urls names {len(engine.urls)} servers, and each has a replica; none is left"
        )
    return {
        "url": engine.urls[replica],
        "api": engine.api,
        "api_key_variable": engine.api_key_variable,
        "max_requests": engine.max_requests,
        "stream_interval": engine.stream_interval,
        "model": config.model.path,
        "revision": config.model.revision,
        "trust_remote_code": config.model.trust_remote_code,
    }


def replica_spec(config: RolloutConfig, replica: int) -> CoreSpec:
    """`core_spec`, with what its connections are encrypted with."""
    channel, spec = config.channel, core_spec(config, replica)
    if not (channel.tls_certificate and channel.tls_key and channel.tls_authority):
        return spec
    files = TlsFiles(channel.tls_certificate, channel.tls_key, channel.tls_authority)
    return attrs.evolve(spec, tls=files)


def channel_terms(config: RolloutConfig) -> Terms:
    """What both sides of the channels keep to."""
    channel = config.channel
    return Terms(
        heartbeat_s=channel.heartbeat_s,
        heartbeat_timeout_s=channel.heartbeat_timeout_s,
        reconnect_s=channel.reconnect_s,
        max_frame_bytes=channel.max_frame_bytes,
        stream_interval=config.engine.stream_interval,
        stream_interval_s=channel.stream_interval_s,
    )


@asynccontextmanager
async def open_placement(config: RolloutConfig) -> AsyncIterator[Placement]:
    """Where the engines of this configuration live.

    Raises:
        EngineError: Engines cannot be placed there.
    """
    match config.placement:
        case InProcessPlacement():
            yield InProcess()
        case LocalProcessPlacement(python=python):
            yield LocalProcess(python=python)
        case RayPlacement() as ray:
            async with open_ray_actors(
                address=ray.address,
                python=ray.python,
                resources={"GPU": gpus_of(config.engine, ray), "CPU": ray.cpus_per_replica},
                nodes=ray.nodes,
                colocate=ray.colocate,
                machines=ray.machines_per_replica,
            ) as actors:
                yield actors


@asynccontextmanager
async def open_engines(
    config: RolloutConfig,
    facts: FactsGiver | None = None,
    events: EventStream | None = None,
    *,
    placement: Placement | None = None,
) -> AsyncIterator[EnginePool]:
    """The engines of a configuration, all serving; none is left when the block has been left.

    Args:
        facts: Gives what the driver takes for granted of them; awaited before each connects.
        events: Takes what happens to them.
        placement: Where they live; None: where the configuration says.

    Raises:
        EngineError: One of them did not start, with what it said.
    """
    refuse_while_imported("open_engines")
    specs = [replica_spec(config, replica) for replica in range(config.engine.replicas)]
    router = Router(
        strategy=config.router.strategy,
        move_margin=config.router.move_margin,
        move_margin_s=config.router.move_margin_s,
    )
    async with open_placement(config) if placement is None else nullcontext(placement) as place:
        pool = EnginePool(
            placement=place,
            specs=specs,
            router=router,
            start_timeout_s=config.engine.start_timeout_s,
            load_shares=config.router.weights,
            spec_of=partial(replica_spec, config),
            policy=config.recovery.policy,
            wait_s=config.recovery.wait_s,
            terms=channel_terms(config),
            facts=facts,
            backoff_s=config.recovery.backoff_s,
            last_answer_s=last_answer_s(config.limits.cleanup_s),
            events=events,
        )
        async with open_pool(pool):
            yield pool
