# ruff: isort: skip_file
from rollout.integrations.langgraph.chat_model import RolloutChatModel as RolloutChatModel
from rollout.integrations.langgraph.graph_agent import (
    GraphAgent as GraphAgent,
    open_chat_model as open_chat_model,
)
