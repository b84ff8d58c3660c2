"""What tools answered to the calls of one turn, as it is remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from rollout.tools.results import ToolResult

_NO_SNAPSHOTS: Mapping[str, Any] = MappingProxyType({})

#: Of tools that were called: those with a state that nobody holds, and the states of others.
States = tuple[Sequence[str], Mapping[str, Any]]


class Answers(msgspec.Struct, gc=False):
    """Results, and what there is of the tools' states after them.

    Attributes:
        results: In the order of the calls.
        seconds: Time in calls.
        stateful: Tools among them that have a state which nobody holds.
        snapshots: The states of the others that have one, by tool.
        number: Counts up in the order in which they were given.
    """

    results: Sequence[ToolResult]
    seconds: float
    stateful: Sequence[str] = ()
    snapshots: Mapping[str, Any] = _NO_SNAPSHOTS
    number: int = 0
