"""Agent loops: one trajectory's program, from its prompt to its end."""

from __future__ import annotations

from rollout.agents import programs
from rollout.agents.agent_loop import AgentLoop, agent_names, get_agent, register_agent
from rollout.agents.context import AgentContext
from rollout.agents.conversation import Conversation
from rollout.agents.environment_agent import EnvironmentAgent
from rollout.agents.function_agent import AgentTask, agent
from rollout.agents.program_agent import ProgramAgent
from rollout.agents.tool_agent import CompactingAgent, SingleTurnAgent, ToolAgent
from rollout.agents.turn import AssistantTurn

__all__ = [
    "AgentContext",
    "AgentLoop",
    "AgentTask",
    "AssistantTurn",
    "CompactingAgent",
    "Conversation",
    "EnvironmentAgent",
    "ProgramAgent",
    "SingleTurnAgent",
    "ToolAgent",
    "agent",
    "agent_names",
    "get_agent",
    "programs",
    "register_agent",
]
