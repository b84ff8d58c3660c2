"""Parsers of the formats in which models write tool calls."""

from rollout.chat.parsers.hermes import HermesParser
from rollout.chat.parsers.registry import (
    ParsedTurn,
    ToolParser,
    get_tool_parser,
    register_tool_parser,
    tool_parser_names,
)

__all__ = [
    "HermesParser",
    "ParsedTurn",
    "ToolParser",
    "get_tool_parser",
    "register_tool_parser",
    "tool_parser_names",
]
