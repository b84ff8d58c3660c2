"""Types of numbers on the command line; each refuses what is none with a usage error."""

from __future__ import annotations

import argparse
import math

#: Of a trainer; see `rollout.scheduling.arguments`, which takes longer to import.
MAX_STEP = 2**63 - 1


def seconds(text: str) -> float:
    """Seconds > 0, finite."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds > 0")
    return number


def positive(text: str) -> int:
    """An integer ≥ 1."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """An integer ≥ 0."""
    return _at_least(0, text)


def step_number(text: str) -> int:
    """A step of a trainer."""
    number = _at_least(0, text)
    if number > MAX_STEP:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer from 0 to {MAX_STEP}")
    return number


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer ≥ {least}")
    return number
