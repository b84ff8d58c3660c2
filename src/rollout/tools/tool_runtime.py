"""What the tools of all trajectories of a runtime share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.observe.tally import Tally
from rollout.tools.policy import ToolGate
from rollout.tools.processes import ToolProcesses
from rollout.tools.truncate import TruncateSide, truncate_text
from rollout.utf8 import encodable
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from rollout.limits import Limit
    from rollout.tools.results import ToolResult

#: The arguments that a tool gets, of the model's and the prompt's; raises a ToolError.
Check = Callable[[Any, Mapping[str, Any]], dict[str, Any]]


class ToolRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """What the tools of all trajectories share; the limits are those of `ToolExecutor`.

    Attributes:
        checks, gates: By tool.
        threads, processes: Where sync and isolated code runs.
        tally: Counts the calls.
    """

    checks: Mapping[str, Check]
    gates: Mapping[str, ToolGate]
    threads: WorkerThreads
    processes: ToolProcesses
    tally: Tally
    max_parallel_calls: int
    max_response_length: int
    truncate_side: TruncateSide
    tool_s: float | None
    cleanup_s: float

    def limit_call(self, gate: ToolGate, turn: Limit) -> Limit:
        """Open the limit of a call that begins now, within its turn's."""
        if gate.policy.timeout_s is not None:
            return turn.open(gate.policy.timeout_s, f"timeout_s of {gate.name!r}")
        return turn.open(self.tool_s, "limits.tool_s")

    def bound_text(self, result: ToolResult) -> ToolResult:
        """A result whose text is no longer than may be, and can be encoded."""
        text = result.text
        if len(text) > self.max_response_length:
            text = truncate_text(text, self.max_response_length, self.truncate_side)
        text = encodable(text)
        return result if text is result.text else msgspec.structs.replace(result, text=text)
