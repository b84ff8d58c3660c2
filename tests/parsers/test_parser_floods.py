"""Adversarial text costs every tool-call parser time linear in its length."""

from __future__ import annotations

import itertools
from time import process_time  # noqa: TID251  (what is compared is CPU time)

import pytest

from parser_cases.floods import FRAGMENTS, floods
from rollout.chat import get_tool_parser
from rollout.chat.parsers.pythonic import MAX_VALUES
from rollout.chat.parsers.scan import MAX_CALLS, MAX_TAGS
from rollout.types import InvalidToolCall, ToolCall
from slow_cases import slow_after, slow_but

SMALL, TIMES = 10_000, 8
#: Eight times the text may take this many times longer; quadratic work takes 64 times.
MOST = 3 * TIMES
#: Seconds below which a measurement says nothing: a tick of some clocks is a hundredth.
TICK_S = 0.01


def seconds(name: str, text: str) -> float:
    parser = get_tool_parser(name)
    started = process_time()
    parser.parse(text)
    parser.parse(text, in_reasoning=True)
    return process_time() - started


def is_linear(name: str, small: str, large: str) -> bool:
    took = seconds(name, large)
    return took < MOST * TICK_S or took < MOST * max(seconds(name, small), TICK_S)


#: Formats, and of how many floods one is measured.
STEPS = [("hermes", 41), ("gpt_oss", 41), ("pythonic", 41), *((name, 1) for name in FRAGMENTS)]


@pytest.mark.parametrize(("name", "step"), slow_after(3, STEPS))
def test_parser_flood_takes_time_linear_in_its_length(name: str, step: int) -> None:
    pairs = zip(floods(name, SMALL), floods(name, TIMES * SMALL), strict=True)
    for (what, small), (_, large) in itertools.islice(pairs, 0, None, step):
        # A neighbour on the machine may disturb one measurement, hardly three.
        assert any(is_linear(name, small, large) for _ in range(3)), what


@pytest.mark.parametrize("name", slow_but(FRAGMENTS, "hermes", "gpt_oss", "pythonic"))
@pytest.mark.parametrize("deep", ["[", '{"a":', "f(x=", "'"])
def test_parser_deep_nesting_does_no_harm(name: str, deep: str) -> None:
    openings = [one for one in FRAGMENTS[name] if len(one) > 1]
    for opening, size in itertools.product(openings, (200, 20_000)):
        turn = get_tool_parser(name).parse(opening + deep * size)
        assert turn.content == turn.content.strip()


@pytest.mark.parametrize("name", FRAGMENTS)
def test_parser_white_space_after_a_fragment_takes_time_linear_in_its_length(name: str) -> None:
    for one in FRAGMENTS[name]:
        small, large = (one + "\n" * size + "x" for size in (SMALL, TIMES * SMALL))
        assert any(is_linear(name, small, large) for _ in range(3)), one


#: How a turn holds calls, and one of them.
CALLS = {
    "gemma": ("```tool_code\n{}```", "f()\n"),
    "gpt_oss": ("{}", "<|channel|>commentary to=f<|message|>{}<|call|>"),
    "hermes": ("{}", '<tool_call>{"name": "f"}</tool_call>'),
    "mistral": ("[TOOL_CALLS][{}]", '{"name": "f"},'),
    "pythonic": ("{}", "[f()]"),
}


@pytest.mark.parametrize("name", CALLS)
def test_parser_turn_with_too_many_calls_runs_none(name: str) -> None:
    parser, (turn, one) = get_tool_parser(name), CALLS[name]
    most = parser.parse(turn.format(one * MAX_CALLS)).calls
    assert len(most) == MAX_CALLS
    assert {type(call) for call in most} == {ToolCall}
    (refused,) = parser.parse(turn.format(one * (MAX_CALLS + 1))).calls
    assert isinstance(refused, InvalidToolCall)
    assert refused.reason == "more than 128 calls in a turn; none is executed"


def test_parser_call_after_too_many_tags_is_content() -> None:
    parser, call = get_tool_parser("hermes"), '<tool_call>{"name": "f"}</tool_call>'
    assert len(parser.parse("a <tool_call> " * (MAX_TAGS - 1) + call).calls) == 1
    turn = parser.parse("a <tool_call> " * MAX_TAGS + call)
    assert not turn.calls
    assert turn.content.endswith(call)


@pytest.mark.parametrize("item", ["None,", "[],"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[f(x=[{}])]"),
        ("gemma", "<|tool_call>call:f{{x:[{}]}}<tool_call|>"),
        ("llama3", "<|python_tag|>f.call(x=[{}])"),
    ],
)
def test_parser_call_with_too_many_values_is_invalid(name: str, text: str, item: str) -> None:
    (call,) = get_tool_parser(name).parse(text.format(item * 9)).calls
    assert isinstance(call, ToolCall)
    (call,) = get_tool_parser(name).parse(text.format(item * MAX_VALUES)).calls
    assert isinstance(call, InvalidToolCall)
    assert call.reason.startswith("more than 50,000 values in a call: ")


def test_parser_brackets_that_open_before_a_faulty_list_are_read_once() -> None:
    def nested(commas: int) -> str:
        return "x " + "[f(a=q, " * 48 + "1," * commas + ")]" * 48

    assert any(is_linear("pythonic", nested(5_000), nested(40_000)) for _ in range(3))
    text = nested(400_000)
    assert any(seconds("pythonic", text) < 1.0 for _ in range(3))  # it parses twice


@pytest.mark.parametrize("part", ["a<", "1+", "{}", "None,"])
def test_parser_array_that_is_no_literal_is_found_out_soon(part: str) -> None:
    arrays = {"type": "object", "properties": {"x": {"type": "array"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": arrays}}]
    parser = get_tool_parser("qwen3_coder")

    def seconds_of(value: str) -> float:
        started = process_time()
        text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n"
        parser.parse(f"{text}</tool_call>", tools)
        return process_time() - started

    value = f"[{part * (900_000 // len(part))}1]"
    assert any(seconds_of(value) < 0.5 for _ in range(3))


def test_parser_fence_of_many_calls_is_read_as_far_as_a_turn_may_have() -> None:
    text = "```tool_code\n" + "f(x=1)\n" * 100_000 + "```"
    assert any(seconds("gemma", text) < 1.0 for _ in range(3))
    (call,) = get_tool_parser("gemma").parse(text).calls
    assert isinstance(call, InvalidToolCall)
