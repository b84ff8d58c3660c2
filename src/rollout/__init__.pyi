# ruff: isort: skip_file
from rollout.batch.advantages import group_relative as group_relative
from rollout.agents import (
    AgentContext as AgentContext,
    AgentLoop as AgentLoop,
    AgentTask as AgentTask,
    AssistantTurn as AssistantTurn,
    Conversation as Conversation,
    EnvironmentAgent as EnvironmentAgent,
    ProgramAgent as ProgramAgent,
    ToolAgent as ToolAgent,
    agent as agent,
    programs as programs,
    register_agent as register_agent,
)
from rollout.batch import (
    RolloutBatch as RolloutBatch,
    collate as collate,
)
from rollout.chat.trajectory import (
    Group as Group,
    Segment as Segment,
    Trajectory as Trajectory,
)
from rollout.chat.transcript import Transcript as Transcript
from rollout.config import (
    AgentConfig as AgentConfig,
    ChannelConfig as ChannelConfig,
    CustomEngine as CustomEngine,
    GatewayConfig as GatewayConfig,
    GroupPolicy as GroupPolicy,
    HttpEngine as HttpEngine,
    InProcessPlacement as InProcessPlacement,
    JournalConfig as JournalConfig,
    LengthsConfig as LengthsConfig,
    LimitsConfig as LimitsConfig,
    LocalProcessPlacement as LocalProcessPlacement,
    ModelConfig as ModelConfig,
    ObserveConfig as ObserveConfig,
    RayPlacement as RayPlacement,
    RecoveryConfig as RecoveryConfig,
    RewardsConfig as RewardsConfig,
    RolloutConfig as RolloutConfig,
    RouterConfig as RouterConfig,
    SGLangEngine as SGLangEngine,
    SamplingConfig as SamplingConfig,
    SandboxConfig as SandboxConfig,
    SchedulingConfig as SchedulingConfig,
    SimulatedEngine as SimulatedEngine,
    ToolsConfig as ToolsConfig,
    TransformersEngine as TransformersEngine,
    config_from_dict as config_from_dict,
    dump_config as dump_config,
    load_config as load_config,
)
from rollout.engine.core import SamplingParams as SamplingParams
from rollout.engine.model_files import resolve_model as resolve_model
from rollout.engine.weights import (
    DiskWeights as DiskWeights,
    DistributedWeights as DistributedWeights,
    TensorWeights as TensorWeights,
)
from rollout.environments.tool_set import ToolSet as ToolSet
from rollout.errors import (
    AgentError as AgentError,
    ChannelError as ChannelError,
    ConfigError as ConfigError,
    EngineError as EngineError,
    JournalError as JournalError,
    LimitExceeded as LimitExceeded,
    MediaError as MediaError,
    PromptError as PromptError,
    RolloutError as RolloutError,
    SandboxError as SandboxError,
    SandboxLimit as SandboxLimit,
    SandboxLost as SandboxLost,
    SandboxTimeout as SandboxTimeout,
    SandboxUnavailable as SandboxUnavailable,
    SandboxUnsupported as SandboxUnsupported,
    SourceEnded as SourceEnded,
    TemplateError as TemplateError,
    ToolError as ToolError,
)
from rollout.gateway.gateway import open_gateway as open_gateway
from rollout.interactions import (
    Interaction as Interaction,
    InteractionTurn as InteractionTurn,
)
from rollout.observe.user_spans import trace as trace
from rollout.runtime.blocking import (
    BlockingRollout as BlockingRollout,
    open_rollout_blocking as open_rollout_blocking,
)
from rollout.runtime.opening import open_rollout as open_rollout
from rollout.runtime.runtime import RolloutRuntime as RolloutRuntime
from rollout.sandbox.api import Sandbox as Sandbox
from rollout.scheduling.prompt_files import read_prompts as read_prompts
from rollout.journal.index import load_trajectories as load_trajectories
from rollout.scheduling.selection import has_signal as has_signal
from rollout.testing import Scenario as Scenario
from rollout.tools import (
    Tool as Tool,
    ToolResult as ToolResult,
    ToolSession as ToolSession,
    function_tool as function_tool,
)
from rollout.types import (
    Cause as Cause,
    InvalidToolCall as InvalidToolCall,
    Message as Message,
    Outcome as Outcome,
    Prompt as Prompt,
    Reward as Reward,
    ToolCall as ToolCall,
)

__version__: str
