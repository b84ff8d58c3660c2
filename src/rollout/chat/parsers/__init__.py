"""Parsers of the formats in which models write tool calls."""

from rollout.chat.parsers.function_tags import Qwen3CoderParser, SeedOssParser
from rollout.chat.parsers.gemma import GemmaParser
from rollout.chat.parsers.glm4 import Glm4Parser
from rollout.chat.parsers.gpt_oss import GptOssParser
from rollout.chat.parsers.hermes import HermesParser
from rollout.chat.parsers.llama3 import Llama3Parser
from rollout.chat.parsers.mistral import MistralParser
from rollout.chat.parsers.pythonic import PythonicParser
from rollout.chat.parsers.registry import (
    ParsedTurn,
    ToolParser,
    get_tool_parser,
    register_tool_parser,
    stop_token_ids,
    tool_parser_names,
)
from rollout.chat.parsers.section_formats import DeepSeekV3Parser, KimiK2Parser, MiniMaxM2Parser

__all__ = [
    "DeepSeekV3Parser",
    "GemmaParser",
    "Glm4Parser",
    "GptOssParser",
    "HermesParser",
    "KimiK2Parser",
    "Llama3Parser",
    "MiniMaxM2Parser",
    "MistralParser",
    "ParsedTurn",
    "PythonicParser",
    "Qwen3CoderParser",
    "SeedOssParser",
    "ToolParser",
    "get_tool_parser",
    "register_tool_parser",
    "stop_token_ids",
    "tool_parser_names",
]
