"""What reward functions return: checked, and given to trajectories."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rollout.reward_values import MAX_REWARD, BadRewardError, as_reward, finite_number
from rollout.types import Reward

if TYPE_CHECKING:
    from rollout.chat.group import Group
    from rollout.chat.trajectory import Trajectory
    from rollout.chat.transcript import Transcript

RewardValue = float | Reward | Mapping[str, Any]
#: Takes a trajectory, or what verl gives to its functions; see `reward_signatures`.
RewardFunction = Callable[..., RewardValue | Awaitable[RewardValue]]
#: What a function of a group returns: one for each member, in their order.
GroupRewardValue = Sequence[RewardValue | None]
#: Takes a group whose wanted members have ended.
GroupRewardFunction = Callable[["Group"], GroupRewardValue | Awaitable[GroupRewardValue]]

#: How messages call the functions.
REWARD, GROUP_REWARD = "the reward function", "the group reward function"


def reward_of(value: Any, trajectory: Trajectory, who: str = REWARD) -> Reward:
    """What `who` returned for a trajectory, its values for tokens and segments checked too.

    The values of turns are among those of tokens then.

    Raises:
        BadRewardError: It is something else than a finite number, a `Reward` or a mapping with a
            ``score``, as verl's functions return; or has values of tokens, turns or segments that
            the trajectory does not have.
    """
    reward = as_reward(value, who)
    of_tokens = _by_segment("token_values", reward.token_values, trajectory, who)
    of_turns = _by_segment("turn_values", reward.turn_values, trajectory, who)
    both = of_tokens.keys() & of_turns.keys()
    if both:
        raise BadRewardError(
            f"{who} returned token_values and turn_values of the segment {min(both)}; expected "
            "either of them",
            "turn_values",
        )
    return Reward(
        value=reward.value,
        extra=reward.extra,
        token_values=of_tokens | of_turns,
        segment_values={
            _index(at, trajectory, "segment_values", who): finite_number(
                each, f"{who}, for the segment {at},", field="segment_values"
            )
            for at, each in reward.segment_values.items()
        },
    )


def rewards_of(value: Any, group: Group, who: str = GROUP_REWARD) -> list[Reward | None]:
    """What `who` returned for a group: one reward for each member, in their order.

    None stands for a member without one; what is said of members that are not trainable is not
    looked at.

    Raises:
        BadRewardError: There are more or fewer, or one of them is none; see `reward_of`.
    """
    listed = value.tolist() if hasattr(value, "tolist") else value
    count = len(group.trajectories)
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise BadRewardError(
            f"{who} returned {value!r:.80}; expected a sequence of {count} rewards, one for each "
            "member"
        )
    if len(listed) != count:
        raise BadRewardError(
            f"{who} returned {len(listed)} rewards; expected {count}, one for each member"
        )
    return [
        None
        if each is None or not trajectory.trainable
        else reward_of(each, trajectory, f"{who}, for member {trajectory.member},")
        for each, trajectory in zip(listed, group.trajectories, strict=True)
    ]


def apply_reward(trajectory: Trajectory, reward: Reward) -> None:
    """Give a trajectory the reward that `reward_of` or `rewards_of` returned for it."""
    trajectory.reward = reward.value
    trajectory.extra.update(reward.extra)
    for at, value in reward.segment_values.items():
        trajectory.segments[at].reward = value
    assert isinstance(reward.token_values, Mapping)
    for at, values in reward.token_values.items():
        trajectory.segments[at].token_rewards = array("f", values)


def _by_segment(what: str, given: Any, trajectory: Trajectory, who: str) -> dict[int, array[float]]:
    """The rewards of tokens, packed, by segment."""
    if given is None:
        return {}
    by_segment = given if isinstance(given, Mapping) else {trajectory.main_index: given}
    pack = _of_turns if what == "turn_values" else _of_tokens
    return {
        _index(at, trajectory, what, who): pack(values, trajectory.segments[at].transcript, who)
        for at, values in by_segment.items()
    }


def _index(at: Any, trajectory: Trajectory, what: str, who: str) -> int:
    count = len(trajectory.segments)
    if not isinstance(at, int | np.integer) or isinstance(at, bool) or not 0 <= at < count:
        raise BadRewardError(
            f"{who} returned {what} of the segment {at!r:.80}; the trajectory has {count}, "
            "counted from 0",
            what,
        )
    return int(at)


def _of_tokens(values: Any, transcript: Transcript, who: str) -> array[float]:
    count = transcript.response_length
    numbers = _numbers(values, count, ("token_values", "token", "tokens after the prompt"), who)
    return array("f", numbers.tobytes())


def _of_turns(values: Any, transcript: Transcript, who: str) -> array[float]:
    spans = list(transcript.generated_spans())
    numbers = _numbers(values, len(spans), ("turn_values", "turn", "turns"), who)
    spread = np.zeros(transcript.response_length, dtype=np.float32)
    for span, number in zip(spans, numbers, strict=True):
        if len(span):
            spread[span.stop - 1 - transcript.prompt_length] = number
    return array("f", spread.tobytes())


def _numbers(
    values: Any, count: int, called: tuple[str, str, str], who: str
) -> npt.NDArray[np.float32]:
    what, one, all_of_them = called
    try:
        numbers = np.asarray(_listed(values), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadRewardError(f"{who} returned {what} that are no numbers ({error})", what) from None
    if numbers.shape != (count,):
        raise BadRewardError(
            f"{who} returned {what} of shape {numbers.shape}; expected one for each of the "
            f"{count} {all_of_them}",
            what,
        )
    wrong = np.flatnonzero(~(np.abs(numbers) <= MAX_REWARD))
    if len(wrong):
        raise BadRewardError(
            f"{who} returned {numbers[wrong[0]]} for {one} {wrong[0]}; expected a finite number "
            "that float32 can hold",
            what,
        )
    return numbers.astype(np.float32)


def _listed(values: Any) -> Any:
    """Tensors, or their elements in a list, as numbers: NumPy knows not all that torch does."""
    if hasattr(values, "detach"):
        return values.tolist()
    if isinstance(values, list | tuple):
        return [each.tolist() if hasattr(each, "detach") else each for each in values]
    return values
