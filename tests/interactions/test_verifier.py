"""The simulated user who knows the answer."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.errors import ConfigError
from rollout.interactions import InteractionContext, InteractionTurn, Verifier
from rollout.interactions.verifier import final_answer, is_same_answer

WRONG = "That is not right. Look at it again, and answer once more."


async def answers(verifier: Verifier, *said: str, truth: Any = "42") -> list[InteractionTurn]:
    user = verifier()
    await user.start(InteractionContext(uid="p", member=0, ground_truth=truth))
    return [await user.respond([{"role": "assistant", "content": text}]) for text in said]


@pytest.mark.anyio
async def test_wrong_answer_is_tried_again_and_a_right_or_last_one_ends() -> None:
    assert await answers(Verifier(), "It is 41.", "", "It is 42.") == [
        InteractionTurn(WRONG, score=0.0),
        InteractionTurn(WRONG, score=0.0),
        InteractionTurn("", is_done=True, score=1.0),
    ]
    verifier = Verifier(max_attempts=2, wrong="No. {left} left.")
    assert await answers(verifier, "1", "2") == [
        InteractionTurn("No. 1 left.", score=0.0),
        InteractionTurn("", is_done=True, score=0.0),
    ]


@pytest.mark.anyio
async def test_check_of_ones_own_may_wait_and_score_in_parts() -> None:
    async def half(answer: str, context: InteractionContext) -> float:
        return 0.5 if answer == context.ground_truth else 0.25

    turns = await answers(Verifier(half, right_at=0.5), "a", "b", truth="b")
    assert [(turn.score, turn.is_done) for turn in turns] == [(0.25, False), (0.5, True)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_attempts": 0}, "interaction 'verifier': max_attempts = 0: expected at least 1"),
        (
            {"wrong": "{tries} left"},
            "interaction 'verifier': wrong = '{tries} left': expected no other field than {left} "
            "(KeyError: 'tries')",
        ),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: Any, error: str) -> None:
    with pytest.raises(ConfigError) as failure:
        Verifier(**arguments)
    assert str(failure.value) == error


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 apples and 4 pears make 7.", "7"),
        ("so\n#### 1,234", "1,234"),
        (r"thus \boxed{x+1}, done", "x+1"),
        (r"\boxed{3} no, \boxed{4}", "4"),
        ("The answer is 12, not 13 of 20", "12"),
        ("Answer: Paris", "Paris"),
        ("Paris", "Paris"),
        ("-2.5e3", "-2.5e3"),
        ("", ""),
        ("1" * 1_000_000 + " is 8", "8"),  # long ones cost no more than their end
        (r"So \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \boxed{\text{yes}}", r"\text{yes}"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "truth", "is_same"),
    [
        ("it is 1,000", "1000", True),
        ("7.0", 7, True),
        ("7.5", 7, False),
        ("Answer: paris.", "Paris", True),
        ("$18", "18", True),
        ("", "7", False),
        ("7", None, False),
        ("between 3-5", "5", True),  # and not -5
        ("It is -5.", "-5", True),
        ("9007199254740993", "9007199254740992", False),  # which floats cannot tell apart
        ("1e3", "1000.0", True),
    ],
)
def test_is_same_answer(answer: str, truth: Any, is_same: bool) -> None:
    assert is_same_answer(answer, truth) is is_same
