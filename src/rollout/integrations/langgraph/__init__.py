"""LangChain's chat models and LangGraph's graphs on exact tokens, without HTTP.

Needs the extra ``langgraph``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.lazy import lazy_exports

if TYPE_CHECKING:
    from rollout.integrations.langgraph.chat_model import RolloutChatModel
    from rollout.integrations.langgraph.graph_agent import GraphAgent, open_chat_model

__all__ = ["GraphAgent", "RolloutChatModel", "open_chat_model"]
__getattr__ = lazy_exports(
    globals(),
    {
        "rollout.integrations.langgraph.chat_model": ("RolloutChatModel",),
        "rollout.integrations.langgraph.graph_agent": ("GraphAgent", "open_chat_model"),
    },
)
