"""What anyio finds anew at every call, found once for the loop that runs.

A request asks for the time and for an event; to find the backend first costs as much as the rest of
both. Loaded in engine processes: imports anyio only.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable


def _trio() -> Any:
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_run() else None


def clock() -> Callable[[], float]:
    """`anyio.current_time` of the running loop; of no use in another one."""
    trio = _trio()
    time: Callable[[], float] = (
        anyio.current_time if trio is None else trio.lowlevel.current_clock().current_time
    )
    return time


def event_type() -> type[anyio.Event]:
    """The class of the running loop's events."""
    trio = _trio()
    kind: type[anyio.Event] = type(anyio.Event()) if trio is None else trio.Event
    return kind
