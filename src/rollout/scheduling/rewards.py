"""Runs the user's reward function on one trajectory."""

from __future__ import annotations

import inspect
import math
from array import array
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.types import Reward

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory
    from rollout.chat.transcript import Transcript
    from rollout.worker_threads import WorkerThreads

#: Takes a trajectory, or what verl gives to its functions; see `reward_signatures`.
RewardFunction = Callable[..., "RewardValue | Awaitable[RewardValue]"]
RewardValue = float | Reward | Mapping[str, Any]

#: Tensors hold rewards as float32.
MAX_REWARD = float(np.finfo(np.float32).max)


class BadRewardError(Exception):
    """The reward function returned something that is no reward."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives an awaitable; callable objects count by their `__call__`."""
    call = getattr(function, "__call__", function)  # noqa: B004  (the method itself is wanted)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def compute_reward(
    function: RewardFunction, trajectory: Trajectory, threads: WorkerThreads
) -> Reward:
    """The reward of one trajectory: async functions on the loop, others in a worker thread.

    Raises:
        BadRewardError: The function returned something else than a finite number, a `Reward` or a
            mapping with a ``score``, as verl's functions do; or values of tokens or segments that
            the trajectory does not have.
        Exception: Whatever the function raised.
    """
    value: Any
    if is_async(function):
        value = await function(trajectory)  # type: ignore[misc]
    else:
        value = await threads.run("reward", function, trajectory)
        if inspect.isawaitable(value):
            value = await value
    reward = _as_reward(value)
    for name in ("extra", "segment_values"):
        given = getattr(reward, name)
        if not isinstance(given, Mapping):
            raise BadRewardError(
                f"the reward function returned the {name} {given!r:.80}; expected a mapping"
            )
    return Reward(
        value=_checked(reward.value),
        extra=reward.extra,
        token_values=_token_values(reward.token_values, trajectory),
        segment_values={
            _index(at, trajectory, "segment_values"): _checked(each)
            for at, each in reward.segment_values.items()
        },
    )


def apply_reward(trajectory: Trajectory, reward: Reward) -> None:
    """Give a trajectory the reward that `compute_reward` returned for it."""
    trajectory.reward = reward.value
    trajectory.extra.update(reward.extra)
    for at, value in reward.segment_values.items():
        trajectory.segments[at].reward = value
    assert isinstance(reward.token_values, Mapping)
    for at, values in reward.token_values.items():
        trajectory.segments[at].token_rewards = array("f", values)


def _checked(value: Any) -> float:
    number = _as_float(value)
    if not math.isfinite(number):
        raise BadRewardError(f"the reward function returned {number}; expected a finite number")
    if abs(number) > MAX_REWARD:
        raise BadRewardError(
            f"the reward function returned {number}; expected a number that float32 can hold"
        )
    return number


def _token_values(given: Any, trajectory: Trajectory) -> dict[int, array[float]]:
    """The rewards of tokens, packed, by segment."""
    if given is None:
        return {}
    by_segment = given if isinstance(given, Mapping) else {trajectory.main_index: given}
    return {
        _index(at, trajectory, "token_values"): _packed(values, trajectory.segments[at].transcript)
        for at, values in by_segment.items()
    }


def _index(at: Any, trajectory: Trajectory, what: str) -> int:
    count = len(trajectory.segments)
    if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < count:
        raise BadRewardError(
            f"the reward function returned {what} of the segment {at!r:.80}; the trajectory has "
            f"{count}, counted from 0"
        )
    return at


def _packed(values: Any, transcript: Transcript) -> array[float]:
    detached = values.detach().cpu() if hasattr(values, "detach") else values
    try:
        numbers = np.asarray(detached, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadRewardError(
            f"the reward function returned token_values that are no numbers ({error})"
        ) from None
    if numbers.shape != (transcript.response_length,):
        raise BadRewardError(
            f"the reward function returned token_values of shape {numbers.shape}; expected one for "
            f"each of the {transcript.response_length} tokens after the prompt"
        )
    wrong = np.flatnonzero(~(np.abs(numbers) <= MAX_REWARD))
    if len(wrong):
        raise BadRewardError(
            f"the reward function returned {numbers[wrong[0]]} for token {wrong[0]}; expected a "
            "finite number that float32 can hold"
        )
    return array("f", numbers.astype(np.float32).tobytes())


def _as_reward(value: Any) -> Reward:
    if isinstance(value, Reward):
        return value
    if not isinstance(value, Mapping):
        return Reward(value=value)
    if "score" not in value:
        raise BadRewardError(
            f"the reward function returned {value!r:.80}; expected a mapping to have a score"
        )
    rest = {key: item for key, item in value.items() if key != "score"}
    return Reward(value=value["score"], extra=rest)


def _as_float(value: Any) -> float:
    """A number as a float; a bool is 0 or 1, and NumPy's and torch's scalars are numbers too."""
    number = value
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):  # not one number
        number = value.item()
    if not isinstance(number, int | float):
        raise BadRewardError(
            f"the reward function returned {value!r:.80}; expected a number or a Reward"
        )
    try:
        return float(number)
    except OverflowError:
        return math.inf
