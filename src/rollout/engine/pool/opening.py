"""From a configuration to running engines."""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

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
from rollout.engine.channel.messages import ChannelSettings
from rollout.engine.channel.sockets import TlsFiles
from rollout.engine.cores.simulated.options import parse_scenario
from rollout.engine.cores.simulated.vocabulary import FINGERPRINT
from rollout.engine.model_files import model_path_fault
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.local_process import LocalProcess
from rollout.engine.placement.placement import CoreSpec, Placement
from rollout.engine.placement.ray import open_ray_actors
from rollout.engine.pool.pool import EnginePool, ExpectationsGiver, expect_nothing
from rollout.engine.pool.request_runner import limit_last_answer
from rollout.engine.routing import Router
from rollout.errors import EngineError
from rollout.user_code import refuse_while_imported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.config.engines import EngineConfig
    from rollout.observe.event_stream import EventStream

#: Fields of a kind of engine that its core takes under the same names.
_CORE_OPTIONS = {
    TransformersEngine: "dtype device threads max_running max_queued context_length",
    SimulatedEngine: "stream_interval routed_experts",
    SGLangEngine: (
        "dtype device threads tensor_parallel memory_fraction max_running max_queued "
        "context_length stream_interval deterministic routed_experts"
    ),
    HttpEngine: "api api_key_variable max_requests stream_interval",
}
_CORES = {
    TransformersEngine: "rollout.engine.cores.transformers:TransformersCore",
    SimulatedEngine: "rollout.engine.cores.simulated.simulated_core:SimulatedCore",
    SGLangEngine: "rollout.engine.cores.sglang:SGLangCore",
    HttpEngine: "rollout.engine.cores.http:HttpCore",
}


def build_core_spec(config: RolloutConfig, replica: int) -> CoreSpec:
    """Which core serves this configuration, with its arguments for one replica, by its slot."""
    engine, channel, tls = config.engine, config.channel, None
    if channel.tls_certificate and channel.tls_key and channel.tls_authority:
        tls = TlsFiles(channel.tls_certificate, channel.tls_key, channel.tls_authority)
    if isinstance(engine, CustomEngine):
        return CoreSpec(engine.core, dict(engine.options), tls)
    return CoreSpec(_CORES[type(engine)], _build_options(config, engine, replica), tls)


def _build_options(config: RolloutConfig, engine: EngineConfig, replica: int) -> dict[str, Any]:
    model, names = config.model, _CORE_OPTIONS[type(engine)].split()
    options: dict[str, Any] = {name: getattr(engine, name) for name in names}
    if isinstance(engine, SimulatedEngine):
        options["stream_interval_s"] = config.channel.stream_interval_s
        return {**options, "replica": replica, **engine.scenario}
    if isinstance(engine, TransformersEngine):  # on one machine each takes the next GPU of it
        options["gpu"] = replica if isinstance(config.placement, LocalProcessPlacement) else 0
    options.update(
        model=model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    if isinstance(engine, HttpEngine):
        if replica >= len(engine.urls):
            raise EngineError(
                f"engine.urls names {len(engine.urls)} servers, and each has a replica; none is "
                "left"
            )
        return {**options, "url": engine.urls[replica]}
    fault = model_path_fault(model.path)
    if fault:
        raise EngineError(fault)
    if isinstance(engine, SGLangEngine):
        options["server_args"] = _build_server_args(config, engine, replica)
    return options


def _build_server_args(config: RolloutConfig, engine: SGLangEngine, replica: int) -> dict[str, Any]:
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
    return server_args


def fixed_fingerprint(engine: EngineConfig) -> str:
    """The fingerprint of what an engine serves without a model's files; empty: it has its own."""
    return FINGERPRINT if isinstance(engine, SimulatedEngine) else ""


def find_context_length(engine: EngineConfig) -> int | None:
    """How long a context the configuration gives an engine; None where its model decides."""
    if isinstance(engine, SimulatedEngine):
        return parse_scenario(engine.scenario).capacity.context_length
    room = engine.model_room()
    return None if room is None else room.context_length


@asynccontextmanager
async def open_placement(config: RolloutConfig) -> AsyncIterator[Placement]:
    """The placement of this configuration."""
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
    expectations: ExpectationsGiver = expect_nothing,
    events: EventStream | None = None,
    *,
    placement: Placement | None = None,
) -> AsyncIterator[EnginePool]:
    """The engines of a configuration, serving; none is left when the block has been left.

    As many serve as `engine.min_replicas` says; the others join later.

    Args:
        expectations: Gives what the driver assumes about the model; awaited before each connect.
        events: Takes what happens to them.
        placement: Where they live; None: where the configuration says.

    Raises:
        EngineError: Too many of them did not start, with what one said.
    """
    refuse_while_imported("open_engines")
    engine, router, recovery = config.engine, config.router, config.recovery
    channel = config.channel
    settings = ChannelSettings(
        heartbeat_s=channel.heartbeat_s,
        heartbeat_timeout_s=channel.heartbeat_timeout_s,
        reconnect_s=channel.reconnect_s,
        max_frame_bytes=channel.max_frame_bytes,
        stream_interval=engine.stream_interval,
        stream_interval_s=channel.stream_interval_s,
    )
    async with open_placement(config) if placement is None else nullcontext(placement) as place:
        pool = EnginePool(
            placement=place,
            specs=[build_core_spec(config, replica) for replica in range(engine.replicas)],
            router=Router(
                strategy=router.strategy,
                move_margin=router.move_margin,
                move_margin_s=router.move_margin_s,
            ),
            start_timeout_s=engine.start_timeout_s,
            load_shares=router.weights,
            make_spec=partial(build_core_spec, config),
            min_replicas=engine.min_replicas,
            policy=recovery.policy,
            wait_s=recovery.wait_s,
            settings=settings,
            expectations=expectations,
            backoff_s=recovery.backoff_s,
            last_answer_s=limit_last_answer(config.limits.cleanup_s),
            events=events,
        )
        async with pool.serving():
            yield pool
