"""Parsers of the formats in which models write tool calls."""

from rollout.chat.parsers import gemma, gpt_oss, json_formats, markup, pythonic
from rollout.chat.parsers.registry import (
    ParsedTurn,
    ToolParser,
    get_tool_parser,
    register_tool_parser,
    tool_parser_names,
)

__all__ = [
    "ParsedTurn",
    "ToolParser",
    "gemma",
    "get_tool_parser",
    "gpt_oss",
    "json_formats",
    "markup",
    "pythonic",
    "register_tool_parser",
    "tool_parser_names",
]
