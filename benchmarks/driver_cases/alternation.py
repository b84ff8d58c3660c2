"""Sides that take turns, so that both have the same neighbours on the machine."""

from __future__ import annotations

import json
import statistics
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Figures = dict[str, Any]
#: What is shown while it runs.
SHOWN = ("cpu_ms", "loop_ms", "stall_ms", "wall_ms", "cpu_s", "wall_s")


def alternate(
    acts: Mapping[str, Callable[[], Figures]], rounds: int, *, warm_ups: int = 1
) -> dict[str, list[Figures]]:
    """The figures of each side's rounds, without those that only warm it up."""
    found: dict[str, list[Figures]] = {name: [] for name in acts}
    for number in range(-warm_ups, rounds):
        for name, act in acts.items():
            figures = act()
            shown = {key: round(figures[key], 3) for key in SHOWN if key in figures}
            say(f"    {name}: {json.dumps(shown)}{'' if number >= 0 else ' (warm-up)'}")
            if number >= 0:
                found[name].append(figures)
    return found


def ratio(one: list[Figures], other: list[Figures], key: str) -> float:
    """The median over the rounds of what one took for what the other took in the same round."""
    pairs = zip(one, other, strict=True)
    return float(statistics.median(a[key] / b[key] for a, b in pairs))


def ratios_between(one: list[Figures], other: list[Figures], key: str) -> list[float]:
    """What each round of one took for what those of the other before and after it did."""
    around = [(early[key] + late[key]) / 2 for early, late in pairwise(other)]
    return [each[key] / mean for each, mean in zip(one, around, strict=False)]


def median(rounds: list[Figures], key: str) -> float:
    """The median over the rounds."""
    return float(statistics.median(each[key] for each in rounds))


def medians(rounds: list[Figures]) -> Figures:
    """Of all numbers that differ from round to round; what does not, as it is."""
    return {
        key: round(median(rounds, key), 4) if isinstance(value, float) else value
        for key, value in rounds[0].items()
        if not isinstance(value, list)
    }


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)
