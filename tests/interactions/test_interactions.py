"""Simulated users: one object per trajectory, and one that follows a script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

import rollout
from rollout import Outcome, Prompt
from rollout.config import AgentConfig
from rollout.errors import ConfigError
from rollout.interactions import (
    Interaction,
    InteractionContext,
    InteractionRegistry,
    InteractionTurn,
    ScriptedUser,
)
from rollout.testing import Scenario, run_virtual


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


async def hear(user: Interaction, *answers: str) -> list[InteractionTurn]:
    await user.start(InteractionContext(uid="p", member=0, ground_truth="42"))
    turns = [await user.respond([{"role": "assistant", "content": each}]) for each in answers]
    await user.finish()
    return turns


@pytest.mark.anyio
async def test_interaction_answers_until_it_is_done() -> None:
    assert await hear(InteractionRegistry([Judge]).create("judge"), "41", "42") == [
        InteractionTurn("try again", score=0.0),
        InteractionTurn("right", is_done=True, score=1.0),
    ]


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        ("And then?", "respond of the interaction 'odd' returned 'And then?'; expected an Inter"),
        (InteractionTurn("And?", score=math.nan), "respond of the interaction returned nan; expe"),
    ],
)
def test_respond_that_returns_something_else_fails_its_trajectory(turn: Any, error: str) -> None:
    class Odd(Interaction):
        name = "odd"

        async def respond(self, messages: Sequence[Any]) -> InteractionTurn:
            return turn  # type: ignore[no-any-return]

    async def act() -> None:
        config = Scenario(seed=1).reply("", "Hello").config(agent=AgentConfig(interaction="odd"))
        async with rollout.open_rollout(config, interactions=[Odd]) as runtime:
            (trajectory,) = (await runtime.generate([Prompt("Hi")])).trajectories
        assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "agent")
        assert error in str(trajectory.cause)

    run_virtual(act)


@pytest.mark.anyio
async def test_scripted_user_of_each_trajectory_says_its_lines_and_then_is_done() -> None:
    curious = ScriptedUser(["And then?", "Thanks."], name="curious", scores=[0.5, None])
    registry = InteractionRegistry([curious])
    for _ in range(2):
        user = registry.create("curious")
        assert user.name == "curious"
        assert await hear(user, *["rain"] * 4) == [
            InteractionTurn("And then?", score=0.5),
            InteractionTurn("Thanks."),
            InteractionTurn("", is_done=True),
            InteractionTurn("", is_done=True),
        ]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (
            lambda: ScriptedUser(["a", "b"], name="u", scores=[1.0]),
            "interaction 'u': 2 lines and 1 scores; expected as many scores as lines",
        ),
        (
            lambda: InteractionRegistry([ScriptedUser([], name=name) for name in "ababc"]),
            "interactions with the same name: 'a', 'b'; names must be unique",
        ),
        (
            lambda: InteractionRegistry([Judge()]),  # type: ignore[list-item]
            "got 'judge': each trajectory gets an object of its own",
        ),
    ],
)
def test_user_that_cannot_be_is_refused(make: Any, error: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make()
    assert str(refusal.value).endswith(error)


def test_registry_unknown_name_is_refused_with_the_known_ones() -> None:
    registry = InteractionRegistry([Judge, ScriptedUser([])])
    assert registry.names == ("judge", "scripted")
    registry.check("judge")
    for refused in (registry.check, registry.create):
        with pytest.raises(ConfigError) as caught:
            refused("nobody")
        assert str(caught.value) == "unknown interaction 'nobody'; known: 'judge', 'scripted'"
