"""What is told of a turn while it is said: always the beginning of what the whole turn says."""

from __future__ import annotations

from random import Random  # noqa: TID251  (seeded: the same texts on every machine)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parser_cases import CASES, TOOLS
from parser_cases.floods import FRAGMENTS
from rollout.chat import get_tool_parser
from rollout.chat.parsers.hermes import HermesParser
from rollout.chat.parsers.text import END_TOKENS
from rollout.utf8 import encodable
from slow_cases import slow_but

FORMATS = sorted(CASES)
#: What is told of a turn that opens with these, however a format marks reasoning.
PIECES = (
    *END_TOKENS,
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>"),
    *("<|channel>thought", "<channel|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>"),
    *("<|start|>assistant<|channel|>final<|message|>", "<|channel|>analysis<|message|>"),
    *(" ", "\n", "\n\n", "So ", "it is", "<", "[", "[a", "(", "{", '{"', "}", "`", "ä", "\u2028"),
    *("<tool_call>", "[f(x=1)]", "```tool_code", "</tool_call>", "to=functions.f", ""),
)


def check(name: str, pieces: list[str], *, in_reasoning: bool) -> tuple[str, str | None]:
    """Whatever follows a piece, what is told stands; what is told at the end."""
    parser = get_tool_parser(name)
    listener = parser.listen(in_reasoning=in_reasoning)  # type: ignore[attr-defined]
    text = ""
    for piece in ["", *pieces]:
        text += piece
        before = listener.content, listener.reasoning
        listener.hear(piece)
        assert listener.content.startswith(before[0])
        assert (listener.reasoning or "").startswith(before[1] or "")
        assert before[1] is None or listener.reasoning is not None
        turn = parser.parse(text, TOOLS, in_reasoning=in_reasoning)  # type: ignore[attr-defined]
        assert turn.content.startswith(listener.content), (text, turn, listener.content)
        if listener.reasoning is not None:
            assert turn.reasoning is not None, text
            assert turn.reasoning.startswith(listener.reasoning), (text, turn, listener.reasoning)
    return listener.content, listener.reasoning


def cut(random: Random, text: str) -> list[str]:
    pieces = []
    while text:
        size = random.choice((1, 1, 2, 3, 8, 40))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("name", slow_but(FORMATS, "hermes", "gpt_oss", "pythonic"))
def test_listener_of_cases_tells_the_beginning_of_the_turn(name: str) -> None:
    random = Random(name)
    for case in CASES[name]:
        for pieces in (list(case.text), cut(random, case.text), [case.text]):
            check(name, pieces, in_reasoning=case.in_reasoning)


@pytest.mark.parametrize("name", slow_but(FORMATS, "hermes", "gpt_oss", "pythonic"))
@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.booleans(), st.randoms())
def test_listener_of_any_text_tells_the_beginning_of_the_turn(
    name: str, parts: list[str], in_reasoning: bool, random: Random
) -> None:
    check(name, cut(random, "".join(parts)), in_reasoning=in_reasoning)


@pytest.mark.parametrize("name", slow_but(FORMATS, "hermes", "gpt_oss", "pythonic"))
def test_listener_of_mutated_cases_tells_the_beginning_of_the_turn(name: str) -> None:
    random, texts = Random(f"{name} mutated"), [case.text for case in CASES[name]]
    for _ in range(300):
        text = random.choice(texts)
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(text) + 1)
            piece = random.choice((*PIECES, *FRAGMENTS.get(name, ())))
            text = text[:at] + piece + text[at + random.choice((0, 0, 5)) :]
        check(name, cut(random, encodable(text)), in_reasoning=random.random() < 0.3)


#: A turn of each format as its model says it, and what of it is told before the call.
SAID = {
    "gpt_oss": (
        "<|channel|>analysis<|message|>I must\n look.<|end|><|start|>assistant<|channel|>final"
        "<|message|>I look <at> [it], {so}: a < b."
    ),
    "mistral": "[THINK]I must\n look.[/THINK]\n\nI look <at> [it], {so}: a < b.",
    "seed_oss": "<seed:think>I must\n look.</seed:think>\nI look <at> [it], {so}: a < b.",
    "gemma": "<|channel>thought\nI must\n look.<channel|>I look <at> [it], {so}: a < b.",
}
THINKS = "<think>\nI must\n look.\n</think>\n\nI look <at> [it], {so}: a < b."


@pytest.mark.parametrize("name", slow_but(FORMATS, "hermes", "gpt_oss", "pythonic"))
def test_listener_tells_all_before_the_first_call(name: str) -> None:
    told = check(name, list(SAID.get(name, THINKS)), in_reasoning=False)
    assert told == ("I look <at> [it], {so}: a < b.", "I must\n look.")


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"gpt_oss"}))
def test_closing_tag_that_nothing_opened_is_text(name: str) -> None:
    parser = get_tool_parser(name)
    (_, closing) = parser.reasoning_tags[0]  # type: ignore[attr-defined]
    text = f"I know. {closing} So."
    assert check(name, list(text), in_reasoning=False)[0] == text
    turn = parser.parse(text, TOOLS)
    assert (turn.content, turn.reasoning) == (text, None)


def test_parser_that_changes_what_is_read_is_not_listened_to() -> None:
    class Loud(HermesParser):
        def parse(self, text: str, *more: object, **named: object):  # type: ignore[no-untyped-def, override]
            return super().parse(text.upper())

    class Other(HermesParser):
        opening = "CALL [a-z]"

    assert Loud().listen(in_reasoning=False) is None
    assert Other().listen(in_reasoning=False) is None
