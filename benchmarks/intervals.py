"""Means with the intervals in which they lie in 95 of 100 cases."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Student's t at 97.5 % by degrees of freedom; past the last one its limit, the normal's.
STUDENT_T = (
    *(math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
NORMAL = 1.96


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Mean of at least two values, and half of its 95 % interval by Student's distribution."""
    freedom = len(values) - 1
    t = STUDENT_T[freedom] if freedom < len(STUDENT_T) else NORMAL
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def ratio_and_half(ratios: Sequence[float]) -> tuple[float, float]:
    """Geometric mean of at least two ratios, and about half of its 95 % interval."""
    mean, half = mean_and_half([math.log(ratio) for ratio in ratios])
    return math.exp(mean), math.exp(mean) * half
