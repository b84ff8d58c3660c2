"""Runs the user's reward function on one trajectory."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rollout.types import Reward, Trajectory

if TYPE_CHECKING:
    from rollout.bridge import WorkerThreads

RewardFunction = Callable[[Trajectory], "float | Reward | Awaitable[float | Reward]"]


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
        BadRewardError: The function returned something else than a finite number or a `Reward`.
        Exception: Whatever the function raised.
    """
    value: Any
    if is_async(function):
        value = await function(trajectory)  # type: ignore[misc]
    else:
        value = await threads.run("reward", function, trajectory)
        if inspect.isawaitable(value):
            value = await value
    reward = value if isinstance(value, Reward) else Reward(value=value)
    if not isinstance(reward.extra, Mapping):
        raise BadRewardError(
            f"the reward function returned the extra {reward.extra!r:.80}; expected a mapping"
        )
    number = _as_float(reward.value)
    if not math.isfinite(number):
        raise BadRewardError(f"the reward function returned {number}; expected a finite number")
    return Reward(value=number, extra=reward.extra)


def _as_float(value: Any) -> float:
    """A number as a float; NumPy and torch scalars too, a bool never."""
    number = value
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):  # not one number
        number = value.item()
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise BadRewardError(
            f"the reward function returned {value!r:.80}; expected a number or a Reward"
        )
    return float(number)
