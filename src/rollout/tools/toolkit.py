"""What the tools of all trajectories of a runtime share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.observe.tally import Tally
from rollout.tools.argument_checks import ArgumentsError
from rollout.tools.gate import ToolGate
from rollout.tools.tool_processes import ToolProcesses
from rollout.tools.truncate import TruncateSide, truncate_text
from rollout.utf8 import encodable
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from rollout.limits import Limit
    from rollout.tools.policy import ToolPolicy
    from rollout.tools.results import ToolResult
    from rollout.tools.tool import ToolContexts
    from rollout.types import ToolCall

#: Lets a call's arguments pass, given the prompt's kwargs for its tool, or raises ArgumentsError.
ArgumentCheck = Callable[[Any, Mapping[str, Any]], None]


class CallLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds on a trajectory's calls; see the fields of the configuration by these names."""

    max_parallel_calls: int
    max_response_length: int
    truncate_side: TruncateSide
    tool_s: float | None
    cleanup_s: float

    def limit_call(self, name: str, policy: ToolPolicy, turn: Limit) -> Limit:
        """The limit of a call of this tool that begins now, within its turn's."""
        if policy.timeout_s is not None:
            return turn.open(policy.timeout_s, f"timeout_s of {name!r}")
        return turn.open(self.tool_s, "limits.tool_s")

    def within(self, result: ToolResult) -> ToolResult:
        """A result whose text is no longer than may be, and can be encoded."""
        text = result.text
        if len(text) > self.max_response_length:
            text = truncate_text(text, self.max_response_length, self.truncate_side)
        text = encodable(text)
        return result if text is result.text else msgspec.structs.replace(result, text=text)


class Toolkit(msgspec.Struct, frozen=True, kw_only=True):
    """What the tools of all trajectories share.

    Attributes:
        checks, gates: By tool.
        has_states: Whether any of them has a state; see `Tool.stateful`.
        opens_first: Whether any of them does; see `Tool.opens_first`.
        threads, processes: Where sync and isolated code runs.
        tally: Counts the calls.
    """

    checks: Mapping[str, ArgumentCheck]
    gates: Mapping[str, ToolGate]
    limits: CallLimits
    threads: WorkerThreads
    processes: ToolProcesses
    has_states: bool = True
    tally: Tally = msgspec.field(default_factory=Tally)
    opens_first: bool = False

    def fault(self, call: ToolCall, known: Collection[str], contexts: ToolContexts) -> str | None:
        """Why this call cannot be run as it is, where only `known` tools may be called."""
        if call.name not in known:
            names = ", ".join(map(repr, known)) or "none"
            return f"unknown tool {call.name!r}; known tools: {names}"
        try:
            self.checks[call.name](call.arguments, contexts[call.name].kwargs)
        except ArgumentsError as error:
            return str(error)
        return None
