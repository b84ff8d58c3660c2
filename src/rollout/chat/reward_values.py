"""What may be given as a reward, by reward functions, agents, tools and users; and its checks."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout.chat.trajectory import Group
from rollout.types import Reward

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory
    from rollout.chat.transcript import Transcript

#: How messages call the functions.
REWARD, GROUP_REWARD = "the reward function", "the group reward function"
#: Tensors hold rewards as float32.
MAX_REWARD = float(np.finfo(np.float32).max)


class BadRewardError(Exception):
    """What was returned as a reward is none.

    Attributes:
        field: Of a `Reward`, which is at fault; "reward" stands for its value.
    """

    def __init__(self, message: str, field: str = "reward") -> None:
        super().__init__(message)
        self.field = field


def _describe(who: str, found: object, expected: str, field: str = "reward") -> BadRewardError:
    return BadRewardError(f"{who} returned {found}; expected {expected}", field)


def as_reward(value: Any, who: str) -> Reward:
    """A number, a `Reward` or a mapping with a ``score`` as a `Reward`, its value checked.

    Args:
        value: What `who` returned.
        who: For the message, e.g. "the reward function".

    Raises:
        BadRewardError: It is none of these, or no finite number.
    """
    reward = value if isinstance(value, Reward) else Reward(value=value)
    if isinstance(value, Mapping):
        if "score" not in value:
            raise _describe(who, f"{value!r:.80}", "a mapping to have a score")
        rest = {key: item for key, item in value.items() if key != "score"}
        reward = Reward(value=value["score"], extra=rest)
    for name in ("extra", "segment_values"):
        items = getattr(reward, name)
        if not isinstance(items, Mapping):
            raise _describe(who, f"the {name} {items!r:.80}", "a mapping", name)
    for key in reward.extra:
        if not isinstance(key, str):
            raise _describe(who, f"the key {key!r:.80} in extra", "a str", "extra")
    number = finite_number(reward.value, who, expected="a number or a Reward")
    return msgspec.structs.replace(reward, value=number)


def finite_number(
    value: Any, who: str, *, field: str = "reward", expected: str = "a number"
) -> float:
    """A number as a float; a bool is 0 or 1, and NumPy's and torch's scalars are numbers too.

    Args:
        value: What `who` returned.
        who: For the message.
        field: That of the `BadRewardError`.
        expected: What is taken, for the message on what is no number.

    Raises:
        BadRewardError: It is no finite number that float32 can hold.
    """
    number = value
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):  # not one number
        number = value.item()
    if not isinstance(number, int | float):
        raise _describe(who, f"{value!r:.80}", expected, field)
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _describe(who, number, "a finite number", field)
    if abs(number) > MAX_REWARD:
        raise _describe(who, number, "a number that float32 can hold", field)
    return number


def check_reward_value(value: Any, trajectory: Trajectory, who: str = REWARD) -> Reward:
    """What `who` returned for a trajectory, its values for tokens and segments checked too.

    The values of turns are among those of tokens then.

    Raises:
        BadRewardError: It is something else than a finite number, a `Reward` or a mapping with a
            ``score``, as verl's functions return; or has values of tokens, turns or segments that
            the trajectory does not have.
    """
    reward, segments = as_reward(value, who), trajectory.segments

    def check_index(at: Any, field: str) -> int:
        is_index = isinstance(at, int | np.integer) and not isinstance(at, bool)
        if not is_index or not 0 <= at < len(segments):
            found = f"{who} returned {field} of the segment {at!r:.80}"
            count = f"the trajectory has {len(segments)}, counted from 0"
            raise BadRewardError(f"{found}; {count}", field)
        return int(at)

    packed: dict[int, array[float]] = {}
    own: dict[int, float] = {}
    for field in ("token_values", "turn_values"):
        values = getattr(reward, field)
        if values is not None and not isinstance(values, Mapping):
            values = {trajectory.main_index: values}
        for at, each in (values or {}).items():
            index = check_index(at, field)
            if index in packed:
                found = f"token_values and turn_values of the segment {index}"
                raise _describe(who, found, "either of them", field)
            packed[index] = _pack(field, each, segments[index].transcript, who)
    for at, each in reward.segment_values.items():
        index, of_whom = check_index(at, "segment_values"), f"{who}, for the segment {at},"
        own[index] = finite_number(each, of_whom, field="segment_values")
    return Reward(reward.value, extra=reward.extra, token_values=packed, segment_values=own)


def _pack(field: str, values: Any, transcript: Transcript, who: str) -> array[float]:
    """The rewards of a segment's tokens after its prompt, given for each of them or each turn."""
    spans = list(transcript.generated_spans())
    count, one, each_of = len(spans), "turn", "turns"
    if field == "token_values":
        count, one, each_of = transcript.response_length, "token", "tokens after the prompt"
    if isinstance(values, list | tuple):  # NumPy does not read every tensor
        values = [each.tolist() if hasattr(each, "detach") else each for each in values]
    try:
        values = values.tolist() if hasattr(values, "detach") else values
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        found = f"{who} returned {field} that are no numbers ({error})"
        raise BadRewardError(found, field) from None
    if numbers.shape != (count,):
        expected = f"one for each of the {count} {each_of}"
        raise _describe(who, f"{field} of shape {numbers.shape}", expected, field)
    wrong = np.flatnonzero(~(np.abs(numbers) <= MAX_REWARD))
    if len(wrong):
        found = f"{numbers[wrong[0]]} for {one} {wrong[0]}"
        raise _describe(who, found, "a finite number that float32 can hold", field)
    if field == "turn_values":
        turns, numbers = numbers, np.zeros(transcript.response_length)
        for span, number in zip(spans, turns, strict=True):
            if len(span):
                numbers[span.stop - 1 - transcript.prompt_length] = number
    return array("f", numbers.astype(np.float32).tobytes())


def check_rewards(value: Any, subject: Trajectory | Group) -> list[Reward | None]:
    """What a reward function returned: for a group one reward for each member, in their order.

    None stands for a member without one; what is returned for members that are not trainable is
    not looked at.

    Raises:
        BadRewardError: There are more or fewer, or one is none; see `check_reward_value`.
    """
    if not isinstance(subject, Group):
        return [check_reward_value(value, subject)]
    members, who = subject.trajectories, GROUP_REWARD
    listed = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        expected = f"a sequence of {len(members)} rewards, one for each member"
        raise _describe(who, f"{value!r:.80}", expected)
    if len(listed) != len(members):
        raise _describe(who, f"{len(listed)} rewards", f"{len(members)}, one for each member")
    return [
        None
        if each is None or not member.trainable
        else check_reward_value(each, member, f"{who}, for member {member.member},")
        for each, member in zip(listed, members, strict=True)
    ]


def apply_reward(trajectory: Trajectory, reward: Reward) -> None:
    """Give a trajectory the reward that was checked for it."""
    trajectory.reward = reward.value
    trajectory.extra.update(reward.extra)
    for at, value in reward.segment_values.items():
        trajectory.segments[at].reward = value
    assert isinstance(reward.token_values, Mapping)
    for at, values in reward.token_values.items():
        trajectory.segments[at].token_rewards = array("f", values)
