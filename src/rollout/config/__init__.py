"""The configuration: its sections, and how it is loaded, checked and explained."""

from rollout.config.channel_section import ChannelConfig
from rollout.config.config_loading import load_config
from rollout.config.convert import config_from_dict, dump_config
from rollout.config.engines import (
    EMBEDDED_MODEL,
    CustomEngine,
    EngineConfig,
    HttpEngine,
    SGLangEngine,
    SimulatedEngine,
    TransformersEngine,
)
from rollout.config.explain import describe_config
from rollout.config.gateway_section import GatewayConfig
from rollout.config.group_policy import GroupPolicy
from rollout.config.journal_section import JournalConfig
from rollout.config.limits_section import LimitsConfig
from rollout.config.media_section import MediaConfig
from rollout.config.observe_section import ObserveConfig
from rollout.config.placements import (
    InProcessPlacement,
    LocalProcessPlacement,
    PlacementConfig,
    RayPlacement,
)
from rollout.config.recovery_section import RecoveryConfig
from rollout.config.rewards_section import RewardsConfig
from rollout.config.sampling_section import SamplingConfig
from rollout.config.sandbox_section import SandboxConfig
from rollout.config.scheduling_section import SchedulingConfig
from rollout.config.sections import (
    AgentConfig,
    LengthsConfig,
    ModelConfig,
    RolloutConfig,
    RouterConfig,
    ToolsConfig,
)

__all__ = [
    "EMBEDDED_MODEL",
    "AgentConfig",
    "ChannelConfig",
    "CustomEngine",
    "EngineConfig",
    "GatewayConfig",
    "GroupPolicy",
    "HttpEngine",
    "InProcessPlacement",
    "JournalConfig",
    "LengthsConfig",
    "LimitsConfig",
    "LocalProcessPlacement",
    "MediaConfig",
    "ModelConfig",
    "ObserveConfig",
    "PlacementConfig",
    "RayPlacement",
    "RecoveryConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RouterConfig",
    "SGLangEngine",
    "SamplingConfig",
    "SandboxConfig",
    "SchedulingConfig",
    "SimulatedEngine",
    "ToolsConfig",
    "TransformersEngine",
    "config_from_dict",
    "describe_config",
    "dump_config",
    "load_config",
]
