"""What tools answered to the calls of one turn, as a journal remembers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout.tools.results import ToolResult

#: Stateful tools that were called; and nothing, in the place of states of others.
States = tuple[Sequence[str], Mapping[str, Any]]


class Answers(msgspec.Struct, gc=False):
    """Results in the order of the calls, and the time in calls."""

    results: Sequence[ToolResult]
    seconds: float
