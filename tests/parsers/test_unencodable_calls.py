"""Calls that no template could render again: the model is told, and its trajectory has a reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rollout
from call_writing import WRITE
from rollout import InvalidToolCall, Outcome, Prompt, Trajectory, function_tool
from rollout.chat import get_tool_parser
from rollout.config import AgentConfig, LengthsConfig, ModelConfig
from rollout.testing import Scenario
from rollout.tools import ToolResult
from slow_cases import slow_but

FORMATS = Path(__file__).parents[1] / "chat_formats"
TYPED = {"type": "object", "properties": {"x": {"type": ["object", "array"]}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": TYPED}}
FORMATS_TRIED = slow_but(WRITE, "hermes", "gpt_oss", "pythonic")
MARKED = ('"VALUE"', "'VALUE'", '<|"|>VALUE<|"|>', "VALUE")


def written(tool_format: str, value: str, *, name: str = "look") -> str:
    """A call with the argument x, whose value is JSON that is Python too, as it stands here."""
    text = WRITE[tool_format](name, {"x": "VALUE"})
    return text.replace(next(each for each in MARKED if each in text), value)


@pytest.mark.parametrize("name", FORMATS_TRIED)
@pytest.mark.parametrize("value", ['["\\ud800"]', '{"\\udbff": 1}'])
def test_parser_argument_with_half_of_a_character_is_an_invalid_call(name: str, value: str) -> None:
    text = written(name, value)
    (call,) = get_tool_parser(name).parse(text, [TOOL]).calls
    assert isinstance(call, InvalidToolCall)
    assert call.raw in text
    half = json.dumps(json.loads(value)).partition("\\u")[2][:4]
    assert call.reason.startswith("half of a character in '")
    assert f"\\u{half}" in call.reason


@pytest.mark.parametrize("name", FORMATS_TRIED)
def test_parser_pair_of_halves_that_json_joins_is_a_call(name: str) -> None:
    text = written(name, '["\\ud83d\\ude00"]')
    (call,) = get_tool_parser(name).parse(text, [TOOL]).calls
    if name == "pythonic":  # where they are two characters, as in Python
        call = get_tool_parser(name).parse(text.replace("\\ud83d\\ude00", "\\U0001f600")).calls[0]
    assert not isinstance(call, InvalidToolCall)
    assert call.arguments == {"x": ["😀"]}


@pytest.mark.parametrize("name", FORMATS_TRIED)
def test_parser_name_with_half_of_a_character_is_an_invalid_call(name: str) -> None:
    text = written(name, "[]", name="lo\ud800ok")
    turn = get_tool_parser(name).parse(text, [TOOL])
    assert all(isinstance(call, InvalidToolCall) for call in turn.calls)
    turn.content.encode()


def test_parser_half_of_a_character_in_content_is_replaced() -> None:
    turn = get_tool_parser("hermes").parse("<think>a\ud800</think>b\udfff")
    assert (turn.reasoning, turn.content) == ("a\ufffd", "b\ufffd")


@function_tool
async def look(x: list[Any] | dict[str, Any] | int | float | str) -> ToolResult:
    """Look.

    Args:
        x: At what.
    """
    return ToolResult("seen")


async def play(said: str, *, family: str = "", **agent: Any) -> Trajectory:
    """The model says this, is answered, and says that it is done."""
    scenario = Scenario(seed=1)
    for answered in ("seen", "invalid tool call", "invalid arguments"):
        scenario = scenario.reply(answered, "It is done.")
    scenario = scenario.reply("done?", said)
    path = str(FORMATS / f"{family}.jinja") if family else None
    config = scenario.config(
        agent=AgentConfig(history="inference_template", **agent),
        model=ModelConfig(path="simulated", chat_template=path),
        lengths=LengthsConfig(prompt=4096, response=20_000),
    )
    prompt = Prompt(messages=[{"role": "user", "content": "done?"}])
    async with rollout.open_rollout(config, [look], reward=lambda trajectory: 0.5) as runtime:
        (trajectory,) = (await runtime.generate([prompt])).trajectories
    return trajectory


@pytest.mark.anyio
async def test_trajectory_with_a_call_that_cannot_be_encoded_gets_its_reward() -> None:
    trajectory = await play(written("hermes", '["\\ud800"]'), tool_format="hermes")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0.5)
    answer = next(message for message in trajectory.messages if message.role == "tool")
    assert answer.content == r"invalid tool call: half of a character in '\ud800'"


#: What a model may write as an argument, to be read, checked, answered, rendered and saved.
ODD_VALUES = ["NaN", "1e999", "9" * 4200, '"\\u0000"', "[" * 99 + "]" * 99, '"{{ x }}{% raw %}"']


@pytest.mark.anyio
@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: value[:20])
async def test_trajectory_with_odd_arguments_gets_its_reward(value: str) -> None:
    trajectory = await play(written("hermes", value))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0.5)


ONE = written("hermes", "[1]")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "said", [f"{ONE}\n{ONE}", "<tool_call>{</tool_call>"], ids=["two calls", "no call"]
)
@pytest.mark.parametrize(
    "family",
    slow_but(
        ["llama3", "mistral", "qwen3", "deepseek_v3", "glm4", "kimi_k2", "minimax_m2"],
        "mistral",
        "qwen3",
    ),
)
async def test_trajectory_whose_template_refuses_what_was_said_gets_its_reward(
    family: str, said: str
) -> None:
    trajectory = await play(said, family=family)
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert trajectory.reward == 0.5


@pytest.mark.anyio
async def test_history_refused_by_its_template_is_rendered_in_plain_words() -> None:
    from rollout.testing import decode_ids

    trajectory = await play(f"Look.\n{ONE}\n{ONE}", family="llama3")
    seen = decode_ids(trajectory.transcript.ids().astype("<i4").tobytes())
    assert f"Look.\n{ONE}\n{ONE}" in seen
    assert seen.count("```tool_output\nseen\n```") == 2
    assert [message.role for message in trajectory.messages] == [
        *("user", "assistant", "tool", "tool", "assistant")
    ]
