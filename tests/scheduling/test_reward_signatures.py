"""Reward functions of every shape: taken as they are, or refused before anything starts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import rollout
from rollout import Outcome, Prompt, Trajectory, function_tool
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ADDING = Scenario(seed=1).reply("2 + 3", CALL).then("The sum is 5.").timing(base_s=0.01)


@function_tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def rewarded(reward: Any, **fields: Any) -> Trajectory:
    prompt = Prompt(messages=[{"role": "user", "content": "What is 2 + 3?"}], **fields)
    async with rollout.open_rollout(ADDING.config(), [add], reward) as runtime:
        (trajectory,) = (await runtime.generate([prompt])).trajectories
    return trajectory


class Judge:
    def __call__(self, trajectory: Trajectory) -> float:
        return 0.5

    def method(self, trajectory: Trajectory) -> float:
        return 0.5


class AsyncJudge:
    async def __call__(self, trajectory: Trajectory) -> float:
        await anyio.lowlevel.checkpoint()
        return 0.5


async def plain(trajectory: Trajectory) -> float:
    return 0.5


def weighted(trajectory: Trajectory, weight: float, *, shift: float = 0.0) -> float:
    return weight + shift


def with_default(trajectory: Trajectory, ground_truth: str = "5") -> float:
    return 0.5


@pytest.mark.parametrize(
    "reward",
    [
        plain,
        Judge(),
        Judge().method,
        AsyncJudge(),
        functools.partial(weighted, weight=0.25, shift=0.25),
        with_default,
        lambda t: 0.5,
    ],
)
async def test_reward_of_a_trajectory_is_taken_in_every_shape(reward: Any) -> None:
    assert (await rewarded(reward)).reward == 0.5


def two_arguments(question: str, answer: str) -> float:
    return 0.0


def generator(trajectory: Trajectory) -> Any:
    yield 0.0


def verl_and_more(data_source: str, solution_str: str, ground_truth: str, tokenizer: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (3, "reward = 3: cannot be called"),
        ("judges.score", "reward = 'judges.score': cannot be called; a function's name is written"),
        (lambda completions, **kwargs: [], "is called with lists by TRL's trainer"),
        (two_arguments, "with one trajectory: missing a required argument: 'answer'"),
        (functools.partial(weighted, shift=1.0), "missing a required argument: 'weight'"),
        (generator, ": yields, and does not return"),
        (Judge, f"reward = {Judge!r}: a class, not one of its objects"),
        (verl_and_more, "ground_truth: missing a required argument: 'tokenizer'"),
    ],
)
async def test_reward_of_a_wrong_signature_is_refused_before_an_engine_starts(
    reward: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("rollout.runtime.opening.open_engines", refuse)
    with pytest.raises(rollout.ConfigError, match=re.escape(said)) as caught:
        await rewarded(reward)
    assert "; expected reward(trajectory) -> float | Reward, " in str(caught.value)


# verl's


def recording(seen: list[dict[str, Any]]) -> Callable[..., Any]:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> dict[str, Any]:
        seen.append({k: v for k, v in locals().items() if k != "seen"})
        return {"score": float(ground_truth in solution_str), "acc": True, "pred": "5"}

    return compute_score


async def test_reward_of_verl_gets_its_arguments_and_its_mapping_is_understood() -> None:
    seen: list[dict[str, Any]] = []
    trajectory = await rewarded(
        recording(seen), ground_truth="5", data_source="sums", extra={"index": 7}
    )
    (given,) = seen
    assert (given["data_source"], given["ground_truth"]) == ("sums", "5")
    assert given["extra_info"] == {
        "index": 7,
        "num_turns": trajectory.num_turns,
        "turn_scores": [],
        "tool_rewards": [],
        "rollout_reward_scores": {"user_turn_rewards": []},
    }
    solution = given["solution_str"]
    assert solution.startswith('<tool_call>\n{"name": "add"')  # the whole response, tools included
    assert "The sum is 5." in solution
    assert "<|im_end|>" not in solution  # and no special tokens
    assert "What is 2 + 3?" not in solution
    assert trajectory.reward == 1.0
    assert {key: trajectory.extra[key] for key in ("acc", "pred", "index")} == {
        "acc": True,
        "pred": "5",
        "index": 7,
    }


def short(solution_str: str, ground_truth: str, **kwargs: Any) -> bool:
    return kwargs["data_source"] == "sums" and ground_truth in solution_str


def everything(**kwargs: Any) -> bool:
    return sorted(kwargs) == ["data_source", "extra_info", "ground_truth", "solution_str"]


async def asynchronous(data_source: str, solution_str: str, ground_truth: str, extra_info: Any):  # type: ignore[no-untyped-def]
    await anyio.lowlevel.checkpoint()
    return {"score": 1}


def scaled(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, scale: int):  # type: ignore[no-untyped-def]
    return scale


@pytest.mark.parametrize(
    "reward", [short, everything, asynchronous, functools.partial(scaled, scale=1)]
)
async def test_reward_of_verl_is_told_by_the_names_of_its_parameters(reward: Any) -> None:
    trajectory = await rewarded(reward, ground_truth="5", data_source="sums")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)
