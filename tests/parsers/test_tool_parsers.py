"""Every tool-call format against hand-written texts of its public definition."""

from __future__ import annotations

import pytest

from parser_cases import CASES, TOOLS, seen
from rollout.chat import get_tool_parser
from rollout.types import ToolCall


@pytest.mark.parametrize("name", CASES)
def test_parser_text_of_its_format_means_what_it_says(name: str) -> None:
    for case in CASES[name]:
        turn = get_tool_parser(name).parse(case.text, TOOLS, in_reasoning=case.in_reasoning)
        assert seen(turn.calls, case) == list(case.calls), case.name
        assert (turn.content, turn.reasoning) == (case.content, case.reasoning), case.name
        at = 0
        for call in turn.calls:  # every raw text stands in the turn, in order
            assert call.raw
            at = case.text.index(call.raw, at) + len(call.raw)


def test_parser_numbers_a_call_past_the_ids_that_the_model_gave() -> None:
    text = (
        '[TOOL_CALLS] [{"name": "a", "arguments": {}, "id": "call_1"}, '
        '{"name": "b", "arguments": {}}, {"name": "c", "arguments": {}, "id": "call_2"}, '
        '{"name": "d", "arguments": {}, "id": "call_1"}]'
    )
    calls = get_tool_parser("mistral").parse(text).calls
    assert [call.id for call in calls if isinstance(call, ToolCall)] == [
        "call_1",
        "call_2",
        "call_3",
        "call_4",
    ]


def test_pythonic_names_that_python_keeps_for_itself_are_names_of_arguments() -> None:
    turn = get_tool_parser("pythonic").parse("[f(from='a', class='b', \n x=[-1, +.5, true])]")
    assert [call.arguments for call in turn.calls if isinstance(call, ToolCall)] == [
        {"from": "a", "class": "b", "x": [-1, 0.5, True]}
    ]
