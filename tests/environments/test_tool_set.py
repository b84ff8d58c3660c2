"""Objects with state as tools: what an environment written for TRL relies on holds unchanged."""

from __future__ import annotations

import asyncio  # noqa: TID251  (as environments written for TRL do)
from typing import Any

import pytest

import rollout
from rollout import Outcome, Prompt, Trajectory
from rollout.config import LimitsConfig
from rollout.testing import Scenario
from rollout.testing.scenario import tool_call

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])


class Wordle:
    """As it would be given to TRL: no import of ours."""

    made: list[Wordle]

    def __init__(self) -> None:
        self.log: list[Any] = ["new"]
        type(self).made.append(self)

    def reset(self, **row: Any) -> str | None:
        self.log.append(("reset", row))
        self.secret = row["secret"]
        return f" It has {len(self.secret)} letters."

    def guess(self, word: str) -> str:
        """
        Guess the word.

        Args:
            word: The guessed word.

        Returns:
            What is right in it.
        """
        self.log.append(word)
        if len(word) != len(self.secret):
            raise ValueError("wrong length")
        return "".join(a if a == b else "_" for a, b in zip(word, self.secret, strict=True))

    async def hint(self) -> str:
        """Ask for the first letter."""
        await asyncio.sleep(0)
        self.log.append("hint")
        return self.secret[0]

    def get_reward(self) -> float:
        self.log.append("reward")
        return 1.0 if self.secret in self.log else 0.25

    def _secret(self) -> str:
        return self.secret

    @property
    def letters(self) -> int:
        return len(self.secret)


@pytest.fixture(autouse=True)
def forget() -> None:
    Wordle.made = []


def user(text: str = "Guess it.", uid: str = "p", **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], uid=uid, **fields)


PLAYED = Scenario(seed=1).reply("Guess", tool_call("guess", word="abc") + tool_call("hint"))
PLAYED = PLAYED.then(tool_call("guess", word="tool"), "done")
LIMITS = LimitsConfig(
    generation_s=20, tool_s=10, turn_s=40, trajectory_s=60, batch_s=500, cleanup_s=2
)


async def play(
    tools: Any,
    *prompts: Prompt,
    scenario: Scenario = PLAYED,
    samples: int = 1,
    reward: Any = None,
    limits: LimitsConfig = LIMITS,
    **options: Any,
) -> list[Trajectory]:
    config = scenario.config(limits=limits, **options)
    prompts = prompts or (user(extra={"secret": "tool"}),)
    async with rollout.open_rollout(config, [tools], reward) as runtime:
        return list((await runtime.generate(list(prompts), samples=samples)).trajectories)


@both
async def test_environment_of_trl_is_reset_played_and_rewarded_unchanged() -> None:
    (trajectory,) = await play(rollout.ToolSet(Wordle))
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    (wordle,) = Wordle.made
    row = {
        "prompt": [{"role": "user", "content": "Guess it."}],
        "uid": "p",
        "ground_truth": None,
        "data_source": None,
        "secret": "tool",
    }
    assert wordle.log == ["new", ("reset", row), "abc", "hint", "tool", "reward"]
    said = [(message.role, message.content) for message in trajectory.messages]
    assert said[0] == ("user", "Guess it. It has 4 letters.")
    assert said[2] == ("tool", "ValueError: wrong length")
    assert [text for role, text in said if role == "tool"][1:] == ["t", "tool"]
    assert (trajectory.reward, trajectory.tool_rewards) == (1.0, [1.0])
    assert trajectory.prompt is not None
    assert trajectory.prompt.messages[-1]["content"] == "Guess it. It has 4 letters."  # type: ignore[index, call-overload]


async def test_tool_set_schemas_are_those_of_its_public_methods() -> None:
    async with rollout.open_rollout(PLAYED.config(), [rollout.ToolSet(Wordle)]) as runtime:
        schemas = {each["function"]["name"]: each["function"] for each in runtime.tools.schemas()}
    assert list(schemas) == ["guess", "hint"]
    assert schemas["guess"]["parameters"]["properties"]["word"]["type"] == "string"
    assert schemas["guess"]["parameters"]["required"] == ["word"]
    assert "Guess the word." in schemas["guess"]["description"]


async def test_tool_set_gives_each_member_of_a_group_its_own_object() -> None:
    trajectories = await play(rollout.ToolSet(Wordle), samples=3)
    assert len(Wordle.made) == 3
    assert [each.reward for each in trajectories] == [1.0] * 3
    assert all(wordle.log.count("reward") == 1 for wordle in Wordle.made)
