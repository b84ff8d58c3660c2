"""The tools of one trajectory: calls in, one result for each of them out."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.errors import LimitExceeded, ToolError
from rollout.limits import Deadline
from rollout.tools.attempt import CallError, attempt, run_side_by_side
from rollout.tools.results import (
    ToolResult,
    as_reward,
    encodable,
    error_result,
    normalise_result,
)
from rollout.tools.tool import Tool, ToolContext, ToolSession
from rollout.tools.truncate import TruncateSide, truncate_text
from rollout.types import InvalidToolCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

logger = logging.getLogger("rollout")


class CallLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds on a trajectory's calls; see the fields of the configuration by these names."""

    max_parallel_calls: int
    max_response_length: int
    truncate_side: TruncateSide
    tool_s: float | None
    cleanup_s: float


class _Turn:
    """The calls of one turn on their way; a call whose result is set does not run."""

    def __init__(self, results: list[ToolResult | None], deadline: Deadline) -> None:
        self.results = results
        self.deadline = deadline
        self.limit: LimitExceeded | None = None


class TrajectoryTools:
    """The tools of one trajectory, used and closed in the trajectory's own task.

    Attributes:
        seconds: Time in calls, on the loop's clock; calls at the same time add up.
        calls: Calls that reached a tool.
        errors: Results that are errors, whatever their cause.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        contexts: Mapping[str, ToolContext],
        limits: CallLimits,
    ) -> None:
        self.seconds = 0.0
        self.calls = 0
        self.errors = 0
        self._tools = tools
        self._contexts = contexts
        self._limits = limits
        self._sessions: dict[str, ToolSession] = {}
        self._is_closed = False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools offered to this trajectory."""
        return [tool.schema for tool in self._tools.values()]

    async def run(
        self, calls: Sequence[ToolCall | InvalidToolCall], *, turn_deadline: Deadline
    ) -> list[ToolResult]:
        """The results of one turn's calls, which run at the same time: result i answers call i.

        Every fault is an error result: an invalid call, an unknown tool, wrong arguments, an
        exception, a call past ``limits.tool_s`` or beyond ``agent.max_parallel_calls``. Texts are
        truncated. Cancellation ends the calls and leaves the sessions open, for `close`.

        Raises:
            LimitExceeded: `turn_deadline` passed; every call was cancelled and has ended.
            ToolError: The trajectory's tools are closed.
        """
        if self._is_closed:
            raise ToolError("the tools of this trajectory are closed")
        turn = _Turn([self._refusal(*pair) for pair in enumerate(calls)], turn_deadline)
        await self._open_tools(turn, calls)
        await self._run_calls(turn, calls)
        if turn.limit is not None:
            raise turn.limit
        return [self._finished(result) for result in turn.results if result is not None]

    async def calc_rewards(self) -> list[float]:
        """Rewards of the tools that were used, in the order of their first use.

        A tool without a reward has no entry, nor has one whose `calc_reward` fails or takes longer
        than ``limits.tool_s``: that is logged.
        """
        rewards: dict[str, float] = {}
        asked = self._overriding("calc_reward")
        if asked:
            await run_side_by_side([partial(self._ask_reward, rewards, *pair) for pair in asked])
        return [rewards[name] for name, _ in asked if name in rewards]

    async def _ask_reward(self, rewards: dict[str, float], name: str, session: ToolSession) -> None:
        deadline = Deadline.after(self._limits.tool_s, "limits.tool_s")
        try:
            value = await attempt(session.calc_reward, deadline, owns_task=True)
        except (CallError, LimitExceeded) as error:
            logger.warning("tool %r: calc_reward failed: %s", name, error)
            return
        reward = as_reward(value)
        if reward is not None:
            rewards[name] = reward
        elif value is not None:
            logger.warning(
                "tool %r: calc_reward returned %.80r; expected a finite number", name, value
            )

    def _overriding(self, method: str) -> list[tuple[str, ToolSession]]:
        """The open sessions that do not leave this method as it is: most do, and cost nothing."""
        default = getattr(ToolSession, method)
        return [
            (name, session)
            for name, session in self._sessions.items()
            if getattr(type(session), method) is not default
        ]

    async def close(self) -> None:
        """Close every session once, all at the same time, each within ``limits.cleanup_s``.

        Shielded from cancellation; errors and overruns are logged, never raised.
        """
        self._is_closed = True
        closing = self._overriding("close")
        self._sessions = {}
        if closing:
            with anyio.CancelScope(shield=True):
                await run_side_by_side([partial(self._close_one, *pair) for pair in closing])

    async def _close_one(self, name: str, session: ToolSession) -> None:
        deadline = Deadline.after(self._limits.cleanup_s, "limits.cleanup_s")
        try:
            await attempt(session.close, deadline, shield=True, owns_task=True)
        except (CallError, LimitExceeded) as error:
            logger.warning("tool %r: close failed: %s", name, error)

    def _refusal(self, position: int, call: ToolCall | InvalidToolCall) -> ToolResult | None:
        """Why this call does not run; None where it does."""
        limit = self._limits.max_parallel_calls
        if isinstance(call, InvalidToolCall):
            return error_result(f"invalid tool call: {call.reason}")
        if position >= limit:
            return error_result(
                f"not executed: at most {limit} calls per turn (agent.max_parallel_calls); "
                f"call it again"
            )
        if call.name not in self._tools:
            known = ", ".join(repr(name) for name in self._tools) or "none"
            return error_result(f"unknown tool {call.name!r}; known tools: {known}")
        return None

    async def _open_tools(self, turn: _Turn, calls: Sequence[ToolCall | InvalidToolCall]) -> None:
        """Open the tools that are used for the first time; where one fails, so do its calls."""
        pending = list(_pending(turn, calls))
        for name in dict.fromkeys(call.name for _, call in pending):
            if name in self._sessions:
                continue
            failure = await self._open_tool(turn, name)
            if failure:
                for position, call in pending:
                    if call.name == name:
                        turn.results[position] = error_result(failure)

    async def _open_tool(self, turn: _Turn, name: str) -> str:
        deadline = self._call_deadline(turn)
        tool, context = self._tools[name], self._contexts[name]
        try:
            session = await attempt(lambda: tool.open(context), deadline)
        except CallError as error:
            return f"could not open {name!r}: {error}"
        except LimitExceeded:
            if deadline is turn.deadline:
                raise
            return f"could not open {name!r}: {_timed_out(deadline)}"
        if not isinstance(session, ToolSession):
            kind = type(session).__name__
            return f"could not open {name!r}: open returned {kind}; expected a ToolSession"
        self._sessions[name] = session
        return ""

    def _call_deadline(self, turn: _Turn) -> Deadline:
        return Deadline.after(self._limits.tool_s, "limits.tool_s", outer=turn.deadline)

    async def _run_calls(self, turn: _Turn, calls: Sequence[ToolCall | InvalidToolCall]) -> None:
        pending = list(_pending(turn, calls))
        if pending:
            # One call has its task too: what a tool does to its task must not reach the caller's.
            await run_side_by_side([partial(self._run_call, turn, *pair) for pair in pending])

    async def _run_call(self, turn: _Turn, position: int, call: ToolCall) -> None:
        started = anyio.current_time()
        owner = self._contexts[call.name]
        activity = f"tool {call.name!r} of trajectory {owner.uid}/{owner.member}"  # noqa: F841
        self.calls += 1
        try:
            turn.results[position] = await self._result_of(turn, call)
        finally:
            self.seconds += anyio.current_time() - started

    async def _result_of(self, turn: _Turn, call: ToolCall) -> ToolResult:
        session = self._sessions[call.name]
        deadline = self._call_deadline(turn)
        try:
            return await attempt(lambda: _execute(session, call), deadline, owns_task=True)
        except CallError as error:
            logger.debug("tool %r failed: %s", call.name, error, exc_info=error.__cause__)
            return error_result(str(error))
        except LimitExceeded as limit:
            logger.debug("tool %r %s", call.name, _timed_out(deadline))
            if deadline is turn.deadline:
                turn.limit = limit
            return error_result(_timed_out(deadline))

    def _finished(self, result: ToolResult) -> ToolResult:
        self.errors += result.is_error
        text = truncate_text(
            result.text, self._limits.max_response_length, self._limits.truncate_side
        )
        text = encodable(text)
        return result if text is result.text else msgspec.structs.replace(result, text=text)


def _pending(
    turn: _Turn, calls: Sequence[ToolCall | InvalidToolCall]
) -> Iterator[tuple[int, ToolCall]]:
    for position, call in enumerate(calls):
        if turn.results[position] is None and isinstance(call, ToolCall):
            yield position, call


async def _execute(session: ToolSession, call: ToolCall) -> ToolResult:
    return normalise_result(await session.execute(call))


def _timed_out(deadline: Deadline) -> str:
    return f"timed out after {deadline.seconds:g} s ({deadline.source})"
