"""Tokens and text of a conversation: the transcript, chat templates, tool-call parsers."""

from rollout.chat.parsers import (
    ParsedTurn,
    ToolParser,
    get_tool_parser,
    register_tool_parser,
    tool_parser_names,
)
from rollout.chat.template import ChatTemplate
from rollout.chat.template_loading import load_chat_template
from rollout.chat.transcript import Span, Transcript
from rollout.media.processor import MediaProcessor, load_media_processor

__all__ = [
    "ChatTemplate",
    "MediaProcessor",
    "ParsedTurn",
    "Span",
    "ToolParser",
    "Transcript",
    "get_tool_parser",
    "load_chat_template",
    "load_media_processor",
    "register_tool_parser",
    "tool_parser_names",
]
