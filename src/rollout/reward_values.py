"""What may be given as a reward, by reward functions and by agents themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np

from rollout.types import Reward

NUMBER = "expected a number; what else is to be kept has its place in extra"
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


def as_reward(value: Any, who: str) -> Reward:
    """A number, a `Reward` or a mapping with a ``score`` as a `Reward`, its value checked.

    Args:
        value: What `who` returned.
        who: For the message, e.g. "the reward function".

    Raises:
        BadRewardError: It is none of these, or no finite number.
    """
    reward = _unwrapped(value, who)
    for name in ("extra", "segment_values"):
        given = getattr(reward, name)
        if not isinstance(given, Mapping):
            raise BadRewardError(
                f"{who} returned the {name} {given!r:.80}; expected a mapping", name
            )
    for key in reward.extra:
        if not isinstance(key, str):
            raise BadRewardError(
                f"{who} returned the key {key!r:.80} in extra; expected a str", "extra"
            )
    return Reward(
        value=finite_number(reward.value, who, expected="a number or a Reward"),
        extra=reward.extra,
        token_values=reward.token_values,
        turn_values=reward.turn_values,
        segment_values=reward.segment_values,
    )


def check_metrics(metrics: Mapping[Any, Any], who: str) -> None:
    """Let what somebody made of a trajectory's metrics pass: names with numbers.

    Raises:
        BadRewardError: An item is something else.
    """
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise BadRewardError(f"{who} put {name!r:.80} into metrics; expected a str for a name")
        try:
            is_number = isinstance(value, Real) and isinstance(float(value), float)
        except OverflowError:
            is_number = False
        if not is_number:
            raise BadRewardError(f"{who} put {value!r:.80} into metrics[{name!r:.80}]; {NUMBER}")


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
    number = _as_float(value)
    if number is None:
        raise BadRewardError(f"{who} returned {value!r:.80}; expected {expected}", field)
    if not math.isfinite(number):
        raise BadRewardError(f"{who} returned {number}; expected a finite number", field)
    if abs(number) > MAX_REWARD:
        raise BadRewardError(
            f"{who} returned {number}; expected a number that float32 can hold", field
        )
    return number


def _unwrapped(value: Any, who: str) -> Reward:
    if isinstance(value, Reward):
        return value
    if not isinstance(value, Mapping):
        return Reward(value=value)
    if "score" not in value:
        raise BadRewardError(f"{who} returned {value!r:.80}; expected a mapping to have a score")
    rest = {key: item for key, item in value.items() if key != "score"}
    return Reward(value=value["score"], extra=rest)


def _as_float(value: Any) -> float | None:
    number = value
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):  # not one number
        number = value.item()
    if not isinstance(number, int | float):
        return None
    try:
        return float(number)
    except OverflowError:
        return math.inf
