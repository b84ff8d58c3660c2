"""Tool-call parsers by name, what they return, and the tokens that end a turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from rollout.errors import ConfigError
from rollout.types import InvalidToolCall, ToolCall

#: Tokens with which models end a turn.
END_TOKENS = (
    *("<|im_end|>", "<|endoftext|>", "</s>", "<eos>", "<seed:eos>", "[e~[", "[EOS]"),
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|eot|>", "<|eom|>"),
    *("<|end|>", "<|return|>", "<|call|>", "<|user|>", "<|observation|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<start_function_response>"),
    "<｜end▁of▁sentence｜>",
)


class ParsedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What a model said in one turn.

    Attributes:
        content: The text outside reasoning and calls, without white space around it.
        reasoning: The text inside ``<think>``; None where nothing was opened.
        calls: In the order written; what stands in the place of a call and is none is an
            `InvalidToolCall`.
        written: The content with the text of invalid calls where the model wrote it; None where no
            call is invalid, or the parser does not say.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall | InvalidToolCall, ...] = ()
    written: str | None = None


class ToolParser(Protocol):
    """Splits the text of a turn. Keeps no state: one object may serve many trajectories.

    A parser may name special tokens that end a turn in its format, as ``stop_tokens``, a tuple of
    strings: those that the tokenizer has are added to the sampling.
    """

    def parse(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        in_reasoning: bool = False,
    ) -> ParsedTurn:
        """The content, reasoning and calls of `text`; never raises, whatever the text.

        Args:
            text: A generated turn, decoded with special tokens kept.
            tools: OpenAI-style function dicts, for formats that need types to read arguments.
            in_reasoning: Whether the prompt ended inside ``<think>``
                (`ChatTemplate.ends_in_reasoning`).
        """


Factory = TypeVar("Factory", bound=Callable[[], ToolParser])

_FACTORIES: dict[str, Callable[[], ToolParser]] = {}


def register_tool_parser(name: str) -> Callable[[Factory], Factory]:
    """A decorator that makes a parser class available as ``agent.tool_format = name``.

    Raises:
        ConfigError: The name is taken.
    """

    def register(factory: Factory) -> Factory:
        if name in _FACTORIES:
            raise ConfigError(f"the tool-call format {name!r} is registered already")
        _FACTORIES[name] = factory
        return factory

    return register


def get_tool_parser(name: str) -> ToolParser:
    """A parser of the tool-call format `name`.

    Raises:
        ConfigError: No such format; lists those that there are.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        known = ", ".join(tool_parser_names())
        raise ConfigError(f"unknown tool-call format {name!r}; expected one of: {known}")
    return factory()


def tool_parser_names() -> tuple[str, ...]:
    """The names of all registered formats, sorted."""
    return tuple(sorted(_FACTORIES))


def read_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an OpenAI-style function dict declares; nothing where it is malformed."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def strip_stop(text: str, stop_tokens: tuple[str, ...]) -> str:
    """`text` without the one token that ended it, and without white space at its end."""
    text = text.rstrip()
    for stop in stop_tokens:
        if text.endswith(stop):
            return text.removesuffix(stop).rstrip()
    return text
