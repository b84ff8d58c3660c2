"""Simulated users: one object per trajectory, and one that follows a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout.errors import ConfigError
from rollout.interactions import (
    Interaction,
    InteractionContext,
    InteractionRegistry,
    InteractionTurn,
    ScriptedUser,
)


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Judge(Interaction):
    """Praises the right answer and ends there."""

    name = "judge"

    async def start(self, context: InteractionContext) -> None:
        self.answer = context.ground_truth

    async def respond(self, messages: Sequence[Any]) -> InteractionTurn:
        is_right = messages[-1]["content"] == self.answer
        return InteractionTurn(
            "right" if is_right else "try again", is_done=is_right, score=float(is_right)
        )


CONTEXT = InteractionContext(uid="p", member=0, ground_truth="42")


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.anyio
async def test_interaction_answers_until_it_is_done() -> None:
    judge = InteractionRegistry([Judge]).create("judge")
    await judge.start(CONTEXT)
    assert await judge.respond(said("41")) == InteractionTurn("try again", score=0.0)
    assert await judge.respond(said("42")) == InteractionTurn("right", is_done=True, score=1.0)
    await judge.finish()


@pytest.mark.anyio
async def test_scripted_user_says_its_lines_and_then_is_done() -> None:
    user = ScriptedUser(["And tomorrow?", "Thanks."])()
    await user.start(CONTEXT)
    turns = [await user.respond(said("rain")) for _ in range(4)]
    assert turns == [
        InteractionTurn("And tomorrow?"),
        InteractionTurn("Thanks."),
        InteractionTurn("", is_done=True),
        InteractionTurn("", is_done=True),
    ]
    await user.finish()


@pytest.mark.anyio
async def test_scripted_user_gives_a_score_with_each_line() -> None:
    user = ScriptedUser(["a", "b"], scores=[0.5, None])()
    assert [(await user.respond(said("x"))).score for _ in range(3)] == [0.5, None, None]


@pytest.mark.anyio
async def test_scripted_user_of_each_trajectory_starts_at_the_first_line() -> None:
    registry = InteractionRegistry([ScriptedUser(["a", "b"], name="curious")])
    first, second = registry.create("curious"), registry.create("curious")
    assert first.name == "curious"
    assert (await first.respond(said("x"))).text == "a"
    assert (await first.respond(said("x"))).text == "b"
    assert (await second.respond(said("x"))).text == "a"


def test_scripted_user_with_other_numbers_of_lines_and_scores_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        ScriptedUser(["a", "b"], name="u", scores=[1.0])
    assert str(caught.value) == (
        "interaction 'u': 2 lines and 1 scores; expected as many scores as lines"
    )


def test_registry_equal_names_are_named_all_at_once() -> None:
    users = [ScriptedUser([], name=name) for name in ("a", "b", "a", "b", "c")]
    with pytest.raises(ConfigError) as caught:
        InteractionRegistry(users)
    assert str(caught.value) == "interactions with the same name: 'a', 'b'; names must be unique"


def test_registry_unknown_name_is_refused_with_the_known_ones() -> None:
    registry = InteractionRegistry([Judge, ScriptedUser([])])
    assert registry.names == ("judge", "scripted")
    registry.check("judge")
    for refused in (registry.check, registry.create):
        with pytest.raises(ConfigError) as caught:
            refused("nobody")
        assert str(caught.value) == "unknown interaction 'nobody'; known: 'judge', 'scripted'"
    with pytest.raises(ConfigError, match=r"^unknown interaction 'x'; known: none$"):
        InteractionRegistry().create("x")


class Nameless(Interaction):
    async def respond(self, messages: Sequence[Any]) -> InteractionTurn:
        return InteractionTurn("")


@pytest.mark.parametrize(("factory", "name"), [(Judge(), "judge"), (Nameless, None)])
def test_registry_object_that_is_no_factory_is_refused(factory: Any, name: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        InteractionRegistry([factory])
    assert str(caught.value) == (
        f"interaction {factory!r}: expected an Interaction class or a factory, with a name, got "
        f"{name!r}: each trajectory gets an object of its own"
    )
