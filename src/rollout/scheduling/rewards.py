"""Runs the user's reward function on one trajectory."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.reward_values import MAX_REWARD, BadRewardError, as_reward, finite_number
from rollout.types import Reward
from rollout.worker_threads import is_async

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory
    from rollout.chat.transcript import Transcript
    from rollout.worker_threads import WorkerThreads

#: Takes a trajectory, or what verl gives to its functions; see `reward_signatures`.
RewardFunction = Callable[..., "RewardValue | Awaitable[RewardValue]"]
RewardValue = float | Reward | Mapping[str, Any]

_FUNCTION = "the reward function"


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
    return reward_of(value, trajectory, _FUNCTION)


def reward_of(value: Any, trajectory: Trajectory, who: str) -> Reward:
    """What `who` returned for a trajectory, its values for tokens and segments checked too.

    Raises:
        BadRewardError: See `compute_reward`.
    """
    reward = as_reward(value, who)
    return Reward(
        value=reward.value,
        extra=reward.extra,
        token_values=_token_values(reward.token_values, trajectory, who),
        segment_values={
            _index(at, trajectory, "segment_values", who): finite_number(each, who)
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


def _token_values(given: Any, trajectory: Trajectory, who: str) -> dict[int, array[float]]:
    """The rewards of tokens, packed, by segment."""
    if given is None:
        return {}
    by_segment = given if isinstance(given, Mapping) else {trajectory.main_index: given}
    return {
        _index(at, trajectory, "token_values", who): _packed(
            values, trajectory.segments[at].transcript, who
        )
        for at, values in by_segment.items()
    }


def _index(at: Any, trajectory: Trajectory, what: str, who: str) -> int:
    count = len(trajectory.segments)
    if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < count:
        raise BadRewardError(
            f"{who} returned {what} of the segment {at!r:.80}; the trajectory has {count}, "
            "counted from 0"
        )
    return at


def _packed(values: Any, transcript: Transcript, who: str) -> array[float]:
    detached = values.detach().cpu() if hasattr(values, "detach") else values
    try:
        numbers = np.asarray(detached, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadRewardError(f"{who} returned token_values that are no numbers ({error})") from None
    if numbers.shape != (transcript.response_length,):
        raise BadRewardError(
            f"{who} returned token_values of shape {numbers.shape}; expected one for each of the "
            f"{transcript.response_length} tokens after the prompt"
        )
    wrong = np.flatnonzero(~(np.abs(numbers) <= MAX_REWARD))
    if len(wrong):
        raise BadRewardError(
            f"{who} returned {numbers[wrong[0]]} for token {wrong[0]}; expected a finite number "
            "that float32 can hold"
        )
    return array("f", numbers.astype(np.float32).tobytes())
