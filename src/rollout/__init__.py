"""Token-exact training data for agentic reinforcement learning.

Names are imported on first use, so that ``import rollout`` stays cheap: engine processes, which
may run in an environment with little installed, pay only for what they touch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.lazy import lazy_exports

if TYPE_CHECKING:
    from rollout.advantages import group_relative
    from rollout.agents import (
        AgentContext,
        AgentLoop,
        AgentTask,
        AssistantTurn,
        Conversation,
        EnvironmentAgent,
        ProgramAgent,
        ToolAgent,
        agent,
        register_agent,
    )
    from rollout.batch import RolloutBatch, collate
    from rollout.chat.group import Group
    from rollout.chat.trajectory import Segment, Trajectory
    from rollout.chat.transcript import Transcript
    from rollout.config import (
        AgentConfig,
        ChannelConfig,
        CustomEngine,
        GatewayConfig,
        GroupPolicy,
        HttpEngine,
        InProcessPlacement,
        JournalConfig,
        LengthsConfig,
        LimitsConfig,
        LocalProcessPlacement,
        ModelConfig,
        ObserveConfig,
        RayPlacement,
        RecoveryConfig,
        RewardsConfig,
        RolloutConfig,
        RouterConfig,
        SamplingConfig,
        SchedulingConfig,
        SGLangEngine,
        SimulatedEngine,
        ToolsConfig,
        TransformersEngine,
        config_from_dict,
        dump_config,
        load_config,
    )
    from rollout.engine.core import SamplingParams
    from rollout.engine.model_files import resolve_model
    from rollout.engine.weights import DiskWeights, DistributedWeights, TensorWeights
    from rollout.environments.tool_set import ToolSet
    from rollout.errors import (
        AgentError,
        ChannelError,
        ConfigError,
        EngineError,
        JournalError,
        LimitExceeded,
        MediaError,
        PromptError,
        RolloutError,
        SourceEnded,
        TemplateError,
        ToolError,
    )
    from rollout.gateway.gateway import open_gateway
    from rollout.interactions import Interaction, InteractionTurn
    from rollout.observe.user_spans import trace
    from rollout.runtime.blocking import BlockingRollout, open_rollout_blocking
    from rollout.runtime.opening import open_rollout
    from rollout.runtime.runtime import RolloutRuntime
    from rollout.scheduling.prompt_files import read_prompts
    from rollout.scheduling.saved_trajectories import load_trajectories
    from rollout.scheduling.selection import has_signal
    from rollout.testing import Scenario
    from rollout.tools import Tool, ToolResult, ToolSession, function_tool
    from rollout.types import Cause, InvalidToolCall, Message, Outcome, Prompt, Reward, ToolCall

_HOMES = {
    "rollout.advantages": ("group_relative",),
    "rollout.agents": (
        "AgentContext",
        "AgentLoop",
        "AgentTask",
        "AssistantTurn",
        "Conversation",
        "EnvironmentAgent",
        "ProgramAgent",
        "ToolAgent",
        "agent",
        "register_agent",
    ),
    "rollout.batch": ("RolloutBatch", "collate"),
    "rollout.runtime.blocking": ("BlockingRollout", "open_rollout_blocking"),
    "rollout.chat.group": ("Group",),
    "rollout.chat.trajectory": ("Segment", "Trajectory"),
    "rollout.chat.transcript": ("Transcript",),
    "rollout.config": (
        "AgentConfig",
        "ChannelConfig",
        "CustomEngine",
        "GatewayConfig",
        "GroupPolicy",
        "HttpEngine",
        "InProcessPlacement",
        "JournalConfig",
        "LengthsConfig",
        "LimitsConfig",
        "LocalProcessPlacement",
        "ModelConfig",
        "ObserveConfig",
        "RayPlacement",
        "RecoveryConfig",
        "RewardsConfig",
        "RolloutConfig",
        "RouterConfig",
        "SGLangEngine",
        "SamplingConfig",
        "SchedulingConfig",
        "SimulatedEngine",
        "ToolsConfig",
        "TransformersEngine",
        "config_from_dict",
        "dump_config",
        "load_config",
    ),
    "rollout.engine.core": ("SamplingParams",),
    "rollout.engine.model_files": ("resolve_model",),
    "rollout.engine.weights": ("DiskWeights", "DistributedWeights", "TensorWeights"),
    "rollout.errors": (
        "AgentError",
        "ChannelError",
        "ConfigError",
        "EngineError",
        "JournalError",
        "LimitExceeded",
        "MediaError",
        "PromptError",
        "RolloutError",
        "SourceEnded",
        "TemplateError",
        "ToolError",
    ),
    "rollout.environments.tool_set": ("ToolSet",),
    "rollout.gateway.gateway": ("open_gateway",),
    "rollout.interactions": ("Interaction", "InteractionTurn"),
    "rollout.observe.user_spans": ("trace",),
    "rollout.runtime.opening": ("open_rollout",),
    "rollout.runtime.runtime": ("RolloutRuntime",),
    "rollout.scheduling.prompt_files": ("read_prompts",),
    "rollout.scheduling.saved_trajectories": ("load_trajectories",),
    "rollout.scheduling.selection": ("has_signal",),
    "rollout.testing": ("Scenario",),
    "rollout.tools": ("Tool", "ToolResult", "ToolSession", "function_tool"),
    "rollout.types": (
        "Cause",
        "InvalidToolCall",
        "Message",
        "Outcome",
        "Prompt",
        "Reward",
        "ToolCall",
    ),
}

__version__ = "0.1.0"
__all__ = [
    "AgentConfig",
    "AgentContext",
    "AgentError",
    "AgentLoop",
    "AgentTask",
    "AssistantTurn",
    "BlockingRollout",
    "Cause",
    "ChannelConfig",
    "ChannelError",
    "ConfigError",
    "Conversation",
    "CustomEngine",
    "DiskWeights",
    "DistributedWeights",
    "EngineError",
    "EnvironmentAgent",
    "GatewayConfig",
    "Group",
    "GroupPolicy",
    "HttpEngine",
    "InProcessPlacement",
    "Interaction",
    "InteractionTurn",
    "InvalidToolCall",
    "JournalConfig",
    "JournalError",
    "LengthsConfig",
    "LimitExceeded",
    "LimitsConfig",
    "LocalProcessPlacement",
    "MediaError",
    "Message",
    "ModelConfig",
    "ObserveConfig",
    "Outcome",
    "ProgramAgent",
    "Prompt",
    "PromptError",
    "RayPlacement",
    "RecoveryConfig",
    "Reward",
    "RewardsConfig",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutError",
    "RolloutRuntime",
    "RouterConfig",
    "SGLangEngine",
    "SamplingConfig",
    "SamplingParams",
    "Scenario",
    "SchedulingConfig",
    "Segment",
    "SimulatedEngine",
    "SourceEnded",
    "TemplateError",
    "TensorWeights",
    "Tool",
    "ToolAgent",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "ToolSession",
    "ToolSet",
    "ToolsConfig",
    "Trajectory",
    "Transcript",
    "TransformersEngine",
    "agent",
    "collate",
    "config_from_dict",
    "dump_config",
    "function_tool",
    "group_relative",
    "has_signal",
    "load_config",
    "load_trajectories",
    "open_gateway",
    "open_rollout",
    "open_rollout_blocking",
    "read_prompts",
    "register_agent",
    "resolve_model",
    "trace",
]
__getattr__ = lazy_exports(globals(), _HOMES)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
