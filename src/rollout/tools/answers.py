"""What tools answered to the calls of one turn, as a journal remembers it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollout.tools.results import ToolResult


class Answers(msgspec.Struct, gc=False):
    """Results in the order of the calls, and the time in calls."""

    results: Sequence[ToolResult]
    seconds: float
