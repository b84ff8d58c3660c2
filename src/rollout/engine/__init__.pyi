# ruff: isort: skip_file
from rollout.engine.channel.channel import connect_channel as connect_channel
from rollout.engine.channel.server import EngineServer as EngineServer
from rollout.engine.core import (
    Capabilities as Capabilities,
    Chunk as Chunk,
    EngineCore as EngineCore,
    EngineInfo as EngineInfo,
    EngineLoad as EngineLoad,
    GenerationRequest as GenerationRequest,
    SamplingParams as SamplingParams,
)
from rollout.engine.cores.base import BaseCore as BaseCore
from rollout.engine.placement.ray import gpu_slots_of as gpu_slots_of
from rollout.engine.pool.opening import open_engines as open_engines
from rollout.engine.routing import Router as Router
from rollout.engine.weights import (
    DiskWeights as DiskWeights,
    DistributedWeights as DistributedWeights,
    TensorWeights as TensorWeights,
)
