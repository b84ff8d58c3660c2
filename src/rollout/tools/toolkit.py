"""What the tools of all trajectories of a runtime share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollout.tools.gate import ToolGate
from rollout.tools.tool_processes import ToolProcesses
from rollout.tools.truncate import TruncateSide
from rollout.worker_threads import WorkerThreads

#: Lets a call's arguments pass, given the prompt's kwargs for its tool, or raises ArgumentsError.
ArgumentCheck = Callable[[Any, Mapping[str, Any]], None]


class CallLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds on a trajectory's calls; see the fields of the configuration by these names."""

    max_parallel_calls: int
    max_response_length: int
    truncate_side: TruncateSide
    tool_s: float | None
    cleanup_s: float


class Toolkit(msgspec.Struct, frozen=True, kw_only=True):
    """What the tools of all trajectories share.

    Attributes:
        checks, gates: By tool.
        threads, processes: Where sync and isolated code runs.
    """

    checks: Mapping[str, ArgumentCheck]
    gates: Mapping[str, ToolGate]
    limits: CallLimits
    threads: WorkerThreads
    processes: ToolProcesses
