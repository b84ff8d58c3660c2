"""Runs the user's reward function on one trajectory."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.types import Reward

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory
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
            mapping with a ``score``, as verl's functions do.
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
    if not isinstance(reward.extra, Mapping):
        raise BadRewardError(
            f"the reward function returned the extra {reward.extra!r:.80}; expected a mapping"
        )
    number = _as_float(reward.value)
    if not math.isfinite(number):
        raise BadRewardError(f"the reward function returned {number}; expected a finite number")
    if abs(number) > MAX_REWARD:
        raise BadRewardError(
            f"the reward function returned {number}; expected a number that float32 can hold"
        )
    return Reward(value=number, extra=reward.extra)


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
