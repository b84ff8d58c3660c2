"""Mutated outputs: whatever the text, a tool-call parser returns a well-formed turn."""

from __future__ import annotations

import json
from random import Random  # noqa: TID251  (seeded: the same texts on every machine)

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parser_cases import CASES, TOOLS
from parser_cases.floods import FRAGMENTS
from rollout.chat import get_tool_parser
from rollout.types import InvalidToolCall, ToolCall
from slow_cases import slow_but

ODD = ("\0", "\ud800", "\udfff", "\u2028", "\x85", "\ufeff", "٣", "𝟙", "\r\n")
ODD += ("\\u", "\\ud83d", "1e999", "9" * 5000, "\\x4", "_", "+")
ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=()), max_size=80)


def mutated(random: Random, texts: list[str], fragments: tuple[str, ...]) -> str:
    text = random.choice(texts)
    for _ in range(random.randint(1, 6)):
        at = random.randrange(len(text) + 1)
        to = min(len(text), at + random.randint(0, 30))
        piece = random.choice(
            (
                "",
                text[at:to] * random.randint(0, 3),
                random.choice(fragments),
                random.choice(ODD),
                random.choice(texts)[: random.randint(0, 60)],
                chr(random.randrange(0x3000)),
            )
        )
        text = text[:at] + piece + text[to:]
        if random.random() < 0.1:
            text = text[:at]
    return text


def check(name: str, text: str, *, in_reasoning: bool) -> None:
    turn = get_tool_parser(name).parse(text, TOOLS, in_reasoning=in_reasoning)
    assert turn == get_tool_parser(name).parse(text, TOOLS, in_reasoning=in_reasoning)
    assert turn.content == turn.content.strip()
    ids = [call.id for call in turn.calls if isinstance(call, ToolCall)]
    assert len(set(ids)) == len(ids)
    texts: list[object] = [turn.content, turn.reasoning, ids]
    at = 0
    for call in turn.calls:
        at = text.index(call.raw, at)
        if isinstance(call, InvalidToolCall):
            assert call.reason
            texts.append(call.reason)
        else:
            assert call.name == call.name.strip() != ""
            texts += [call.name, call.arguments]
    json.dumps(texts, allow_nan=False, ensure_ascii=False).encode()


def fuzz(name: str, count: int, seed: int) -> None:
    own = [case.text for case in CASES[name]]
    others = [case.text for cases in CASES.values() for case in cases]
    random = Random(seed)
    for _ in range(count):
        text = mutated(random, own if random.random() < 0.8 else others, FRAGMENTS[name])
        check(name, text, in_reasoning=random.random() < 0.2)


@pytest.mark.parametrize("name", slow_but(CASES, "hermes", "gpt_oss", "pythonic"))
def test_parser_mutated_outputs_are_parsed_without_an_error(name: str) -> None:
    fuzz(name, 1_500, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_parser_a_hundred_thousand_mutated_outputs_are_parsed_without_an_error(name: str) -> None:
    fuzz(name, 100_000, seed=2)


@pytest.mark.parametrize("name", slow_but(CASES, "hermes", "gpt_oss", "pythonic"))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=ANY_TEXT, in_reasoning=st.booleans())
def test_parser_any_text_is_parsed_without_an_error(
    name: str, text: str, in_reasoning: bool
) -> None:
    check(name, text, in_reasoning=in_reasoning)


@pytest.mark.parametrize("name", slow_but(CASES, "hermes", "gpt_oss", "pythonic"))
def test_parser_malformed_tools_do_no_harm(name: str) -> None:
    odd = [{}, {"function": None}, {"function": {"name": 3}}, {"function": {"name": "weather"}}]
    schemas = [None, [], "x", {"properties": []}, {"properties": {"city": 3}}, {"$ref": "#"}]
    named = [{"function": {"name": "weather", "parameters": schema}} for schema in schemas]
    for case in CASES[name]:
        for tools in (odd, *([tool] for tool in named)):
            get_tool_parser(name).parse(case.text, tools)
