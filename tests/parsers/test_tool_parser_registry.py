"""One's own tool-call formats, and the tokens with which a format ends a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import rollout
from parser_cases import CASES
from rollout.chat import (
    ChatTemplate,
    ParsedTurn,
    get_tool_parser,
    register_tool_parser,
    tool_parser_names,
)
from rollout.chat.parsers import registry
from rollout.config import AgentConfig
from rollout.errors import ConfigError
from rollout.runtime.opening import list_stop_tokens
from rollout.testing import Scenario, simulated_tokenizer
from rollout.types import ToolCall


class Shouting:
    """``RUN name`` is a call, and ``<|im_start|>`` ends a turn."""

    stop_tokens = ("<|im_start|>", "<|unknown|>")

    def parse(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        in_reasoning: bool = False,
    ) -> ParsedTurn:
        name = text.partition("RUN ")[2].partition("<")[0]
        calls = (ToolCall(name=name, arguments={}, id="1"),) if name else ()
        return ParsedTurn(content=text.removesuffix("<|im_start|>"), calls=calls)


@pytest.fixture
def shouting(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    register_tool_parser("shouting")(Shouting)
    return "shouting"


def test_registry_knows_all_formats_and_ones_own_by_name(shouting: str) -> None:
    assert set(tool_parser_names()) > set(CASES)
    assert isinstance(get_tool_parser(shouting), Shouting)


def test_registry_unknown_or_taken_name_is_refused() -> None:
    known = ", ".join(tool_parser_names())
    with pytest.raises(ConfigError, match=f"'hermess'; expected one of: {known}"):
        get_tool_parser("hermess")
    with pytest.raises(ConfigError, match="'hermes' is registered already"):
        register_tool_parser("hermes")(Shouting)


@pytest.mark.anyio
async def test_own_format_runs_its_calls_and_ends_turns_with_its_tokens(shouting: str) -> None:
    asked: list[str] = []

    def stretch() -> str:
        """Stretch."""
        asked.append("stretch")
        return "stretched"

    scenario = Scenario(seed=1).reply("stretched", "done<|im_start|>and more")
    scenario = scenario.reply("", "RUN stretch<|im_start|>and more")
    agent = AgentConfig(name="tool_agent", tool_format=shouting)
    prompt = rollout.Prompt(messages=[{"role": "user", "content": "go"}])
    async with rollout.open_rollout(scenario.config(agent=agent), tools=[stretch]) as runtime:
        batch = await runtime.generate([prompt])
    assert [m.content for m in batch.trajectories[0].messages if m.role == "assistant"] == [
        "RUN stretch",
        "done",
    ]
    assert asked == ["stretch"]


def test_stop_tokens_are_those_that_the_tokenizer_has() -> None:
    class Silent:
        parse = Shouting.parse

    template = ChatTemplate(simulated_tokenizer())
    assert list_stop_tokens(template, Shouting()) == (*sorted({257, *template.stop_token_ids}),)
    for parser in (Silent(), get_tool_parser("gpt_oss"), get_tool_parser("hermes")):
        assert list_stop_tokens(template, parser) == (258,)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("gpt_oss", {"<|call|>", "<|return|>"}),
        ("llama3", {"<|eot_id|>", "<|eom_id|>"}),
        ("glm4", {"<|user|>", "<|observation|>"}),
        ("gemma", {"<end_of_turn>", "<turn|>", "<|tool_response>", "<start_function_response>"}),
        ("deepseek_v3", {"<｜end▁of▁sentence｜>"}),
    ],
)
def test_formats_name_the_tokens_that_end_their_turns(name: str, tokens: set[str]) -> None:
    assert set(getattr(get_tool_parser(name), "stop_tokens", ())) >= tokens
