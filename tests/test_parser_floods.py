"""Adversarial text costs every tool-call parser time linear in its length."""

from __future__ import annotations

import itertools
from time import process_time  # noqa: TID251  (what is compared is CPU time)

import pytest

from parser_cases.floods import FRAGMENTS, floods
from rollout.chat import get_tool_parser

SMALL, TIMES = 20_000, 8
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


def check(name: str, step: int) -> None:
    pairs = zip(floods(name, SMALL), floods(name, TIMES * SMALL), strict=True)
    for (what, small), (_, large) in itertools.islice(pairs, 0, None, step):
        # A neighbour on the machine may disturb one measurement, hardly three.
        assert any(is_linear(name, small, large) for _ in range(3)), what


@pytest.mark.parametrize("name", FRAGMENTS)
def test_parser_flood_takes_time_linear_in_its_length(name: str) -> None:
    check(name, step=23)


@pytest.mark.full
@pytest.mark.parametrize("name", FRAGMENTS)
def test_parser_every_flood_takes_time_linear_in_its_length(name: str) -> None:
    check(name, step=1)


@pytest.mark.parametrize("name", FRAGMENTS)
@pytest.mark.parametrize("deep", ["[", "(", "{", '{"a":', "[{", "-", "f(x=", "{a:", "'", '"'])
def test_parser_deep_nesting_does_no_harm(name: str, deep: str) -> None:
    openings = [one for one in FRAGMENTS[name] if len(one) > 1]
    for opening, size in itertools.product(openings, (200, 5_000, 100_000)):
        turn = get_tool_parser(name).parse(opening + deep * size)
        assert turn.content == turn.content.strip()
