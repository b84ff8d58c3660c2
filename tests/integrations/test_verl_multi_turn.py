"""A configuration of verl in our words: its sides of truncation are named the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollout
from rollout.chat import tool_parser_names
from rollout.errors import ConfigError
from rollout.testing import Scenario, tool_call
from rollout.tools import VerlMultiTurn, function_tool, load_verl_multi_turn
from rollout.types import Message, Prompt

TRAINER = """
actor_rollout_ref:
  rollout:
    name: sglang
    multi_turn:
      enable: true
      max_assistant_turns: 5
      max_user_turns: null
      max_parallel_calls: 2
      max_tool_response_length: 10
      tool_response_truncate_side: left
      tool_config_path: tools.yaml
      interaction_config_path: null
      use_inference_chat_template: false
      tokenization_sanity_check_mode: disable
      format: hermes
"""


def test_trainers_file_becomes_settings_and_paths(tmp_path: Path) -> None:
    file = tmp_path / "trainer.yaml"
    file.write_text(TRAINER)
    assert load_verl_multi_turn(file) == VerlMultiTurn(
        settings={
            "agent": {
                "max_assistant_turns": 5,
                "max_user_turns": None,
                "max_parallel_calls": 2,
                "tool_format": "hermes",
                "history": "append_only",
            },
            "tools": {"max_response_length": 10, "truncate_side": "right"},
        },
        tool_config_path="tools.yaml",
    )


def test_section_that_stands_alone_is_read_too() -> None:
    config = {"multi_turn": {"tool_response_truncate_side": "right", "enable": False}}
    assert load_verl_multi_turn(config).settings == {"tools": {"truncate_side": "left"}}


@pytest.mark.parametrize(("theirs", "ours"), [("gpt-oss", "gpt_oss"), ("kimi", "kimi_k2")])
def test_formats_have_our_names(theirs: str, ours: str) -> None:
    found = load_verl_multi_turn({"multi_turn": {"format": theirs}}).settings
    assert found == {"agent": {"tool_format": ours}}
    assert ours in tool_parser_names()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: 1",
            "no section actor_rollout_ref.rollout.multi_turn or rollout.multi_turn or multi_turn; "
            "expected one of verl's",
        ),
        (
            "multi_turn: {tool_response_truncate_side: up}",
            "multi_turn.tool_response_truncate_side = 'up': expected 'left', 'right' or 'middle'",
        ),
        (
            "multi_turn: {max_user_turns: '${turns}'}",
            "multi_turn.max_user_turns = '${turns}': interpolation is not resolved; write the "
            "value",
        ),
    ],
)
def test_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trainer.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_verl_multi_turn(file)
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_answers_are_cut_as_under_verl(tmp_path: Path, anyio_backend: str) -> None:
    @function_tool
    async def digits() -> str:
        """Say them."""
        return "0123456789abcdef"

    file = tmp_path / "trainer.yaml"
    file.write_text(TRAINER)
    settings = load_verl_multi_turn(file).settings
    scenario = Scenario(seed=1).reply("go", tool_call("digits")).then("done")
    config = scenario.config(
        agent=rollout.AgentConfig(**settings["agent"]),
        tools=rollout.ToolsConfig(**settings["tools"]),
    )
    async with rollout.open_rollout(config, tools=[digits]) as runtime:
        batch = await runtime.generate([Prompt(messages=[Message(role="user", content="go")])])
    assert batch.decode is not None
    text = batch.decode(list(batch.trajectories[0].transcript.ids()))
    assert "\n0123456789...(truncated)<" in text
