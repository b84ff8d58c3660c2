"""Reward functions as callers name them, and as child processes find them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from rollout.errors import ConfigError
from rollout.function_refs import FunctionRef, NotImportableError, function_ref
from rollout.user_files import named_object

_EXPECTED = "expected a function, or 'package.module:name'"
_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class NamedReward(NamedTuple):
    """A reward function, and the name it was given by, if any."""

    function: Any
    ref: FunctionRef | None


def named_reward(given: Any, what: str) -> NamedReward:
    """A function as it is; the one that a ``"package.module:name"`` names.

    Args:
        given: The function, or its name.
        what: Where it was given, for the message.

    Raises:
        ConfigError: There is none of that name.
    """
    if not isinstance(given, str) or ":" not in given:  # a text is refused like anything else
        return NamedReward(given, None)
    if not _REFERENCE.fullmatch(given):
        raise ConfigError(f"{what} = {given!r:.200}: {_EXPECTED}")
    found = named_object(given, what, _EXPECTED)
    module, _, qualname = given.partition(":")
    return NamedReward(found, FunctionRef(module=module, file="", qualname=qualname))


def importable(reward: NamedReward, what: str, processes: int) -> FunctionRef:
    """Where a child process finds the function.

    Raises:
        ConfigError: It cannot; says what would let it.
    """
    if reward.ref is not None:
        return reward.ref
    try:
        return function_ref(reward.function)
    except NotImportableError as error:
        raise ConfigError(
            f"{what}: rewards.processes = {processes} {error}, or name it as 'package.module:name'"
        ) from None
