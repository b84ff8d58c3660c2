"""The tools of one trajectory: calls in, one result for each of them out."""

from __future__ import annotations

import itertools
import logging
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.errors import LimitExceeded, ToolError
from rollout.limits import Clock
from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
from rollout.tools.attempt import CallError, attempt, describe_timeout, run_side_by_side
from rollout.tools.function_tools import FunctionTool
from rollout.tools.results import ToolResult, add_metrics, error_result, normalise_result
from rollout.tools.sessions import OpenFailure, OpenSessions
from rollout.tools.tool import ToolContext
from rollout.types import NOT_PARSED, UNKNOWN_TOOL, InvalidToolCall, ToolCall
from rollout.wait_places import format_user_frames

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rollout.limits import Limit
    from rollout.tools.answers import Answers
    from rollout.tools.call_events import CallEvents
    from rollout.tools.tool import Tool, ToolSession
    from rollout.tools.tool_runtime import ToolRuntime
    from rollout.types import Prompt

logger = logging.getLogger("rollout")


class _Turn:
    """The calls of one turn on their way: their results, and those of them that are to run.

    Attributes:
        calls: In the order in which the model wrote them.
        limit: Within which all must have been answered.
        names: Tools that may be called.
        events: Hears of the calls; None where nobody reads.
        results: By the position of the call; None until it has one.
        pending: Positions of the calls that run, with their checked arguments.
    """

    def __init__(
        self,
        calls: Sequence[ToolCall | InvalidToolCall],
        limit: Limit,
        names: Collection[str],
        events: CallEvents | None,
    ) -> None:
        self.calls, self.limit, self.names, self.events = calls, limit, names, events
        self.results: list[ToolResult | None] = [None] * len(calls)
        self.pending: dict[int, ToolCall] = {}


class TrajectoryTools:
    """The tools of one trajectory, used and closed in the trajectory's own task.

    Attributes:
        seconds: Time in calls, on the loop's clock; calls at the same time add up.
        calls: Calls of the model's that have ended, also those that no tool could answer.
        errors: Those of them whose answer is an error, whatever its cause, or that were cancelled.
        invalid_in_a_row: Latest calls in a row that could not be run as asked: not parsed, of an
            unknown tool, or with wrong arguments.
        idle_since: When the last call ended.
        is_closed: Whether they were closed.
        metrics: Sums of the numbers that tools measured, as ``tools/TOOL/NAME``.
        counts: Of each tool that was called, ``tool/TOOL/{calls,errors,seconds,seconds_max}``.
    """

    def __init__(
        self,
        runtime: ToolRuntime,
        tools: Mapping[str, Tool],
        *,
        uid: str,
        member: int,
        kwargs: Mapping[str, Mapping[str, Any]],
        extra: dict[str, Any],
        prompt: Prompt | None = None,
        sandbox: TrajectorySandbox | None = None,
    ) -> None:
        self._runtime, self._tools, self._kwargs = runtime, tools, kwargs
        self._context = ToolContext(
            uid=uid,
            member=member,
            threads=runtime.threads,
            prompt=prompt,
            processes=runtime.processes,
            extra=extra,
            sandbox=sandbox or TrajectorySandbox(),
        )
        self._sessions = OpenSessions(
            tools, self._make_context, tool_s=runtime.tool_s, cleanup_s=runtime.cleanup_s
        )
        self._opening = anyio.Lock(fast_acquire=True)
        self._serial: dict[int, anyio.Lock] = {}
        self._running: dict[tuple[_Turn, int], float] = {}
        self.metrics: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self.seconds, self.idle_since, self.is_closed = 0.0, 0.0, False
        self.calls = self.errors = self.invalid_in_a_row = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools offered to this trajectory."""
        return tuple(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools offered to this trajectory."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def reward(self) -> float | None:
        """The sum of what tools gave that decide the trajectory's reward; None where none did."""
        return self._sessions.reward

    @property
    def under_way(self) -> Sequence[tuple[str, float]]:
        """Calls that run, or wait for a slot: name, and since when."""
        return [(turn.pending[at].name, since) for (turn, at), since in self._running.items()]

    def has_open_sessions(self) -> bool:
        """Whether a tool is open that may hold something: plain functions hold nothing."""
        opened = self._sessions.opened
        return any(not isinstance(self._tools[name], FunctionTool) for name in opened)

    def _make_context(self, name: str) -> ToolContext:
        kwargs = self._kwargs.get(name)
        if not kwargs:
            return self._context
        return msgspec.structs.replace(self._context, kwargs=dict(kwargs))

    async def open_first(self) -> list[str | Sequence[Mapping[str, Any]]]:
        """Open and begin the tools with `Tool.opens_first`; what they observe, in their order.

        What `ToolSession.begin` raises leaves as itself.

        Raises:
            ToolError: One could not be opened.
        """
        for name, tool in self._tools.items():
            if tool.opens_first and name not in self._sessions.opened:
                try:  # `limits.trajectory_s` bounds it
                    await self._sessions.open(name, Clock(), is_bounded=False)
                except OpenFailure as error:
                    raise ToolError(str(error)) from error.__cause__
        observations = [await each.begin() for each in list(self._sessions.opened.values())]
        return [each for each in observations if each is not None]

    async def run(
        self,
        calls: Sequence[ToolCall | InvalidToolCall],
        *,
        limit: Limit,
        offered: Collection[str] | None = None,
        events: CallEvents | None = None,
    ) -> list[ToolResult]:
        """Run one turn's calls at the same time; result i answers call i.

        Every fault is an error result: an invalid call, an unknown tool, wrong arguments, an
        exception, a call past ``limits.tool_s`` or beyond ``agent.max_parallel_calls``. Texts are
        truncated. Cancellation ends the calls and leaves the sessions open, for `close`.

        Args:
            calls: In the order in which the model wrote them.
            limit: The turn's, within which all must have been answered.
            offered: Names of the tools that could be called; None: all.
            events: Hears of them; None where nobody reads.

        Raises:
            LimitExceeded: `limit` was over; every call was cancelled and has ended.
            ToolError: The trajectory's tools are closed.
        """
        if self.is_closed:
            raise ToolError("the tools of this trajectory are closed")
        turn = self._admit(calls, limit, offered, events)
        with limit.open(None, ""):  # it may have ended other blocks: one ends one
            await self._open_tools(turn)
            jobs = [partial(self._run_call, turn, at) for at in turn.pending]
            if len(jobs) == 1:
                await jobs[0]()
            elif jobs:
                await run_side_by_side(jobs)
        results = [self._runtime.bound_text(each) for each in turn.results if each is not None]
        return self._add_metrics(calls, results)

    def recall(
        self,
        calls: Sequence[ToolCall | InvalidToolCall],
        answers: Answers,
        offered: Collection[str] | None = None,
    ) -> list[ToolResult]:
        """As `run`, with the answers of before; no tool runs."""
        turn = self._admit(calls, Clock(), offered, None)
        self.seconds += answers.seconds
        for at in turn.pending:
            turn.results[at] = answers.results[at]
            self._count(turn, at, 0.0, answers.seconds / len(turn.pending))
        return self._add_metrics(calls, list(answers.results))

    def _add_metrics(
        self, calls: Sequence[ToolCall | InvalidToolCall], results: list[ToolResult]
    ) -> list[ToolResult]:
        for call, result in zip(calls, results, strict=True):
            if result.metrics and isinstance(call, ToolCall):
                add_metrics(self.metrics, call.name, result.metrics)
        return results

    def _admit(
        self,
        calls: Sequence[ToolCall | InvalidToolCall],
        limit: Limit,
        offered: Collection[str] | None,
        events: CallEvents | None,
    ) -> _Turn:
        """Check the calls of a turn; those that cannot run are answered."""
        names = [name for name in self._tools if offered is None or name in offered]
        turn, most = _Turn(calls, limit, names, events), self._runtime.max_parallel_calls
        for at, call in enumerate(calls):
            if at >= most and isinstance(call, ToolCall):  # nor does it count as invalid
                fault = (
                    f"not executed: at most {most} calls per turn (agent.max_parallel_calls); "
                    "call it again"
                )
            else:
                fault = self._check(turn, at, call)
                self.invalid_in_a_row = self.invalid_in_a_row + 1 if fault else 0
            if fault:
                self._refuse(turn, at, fault)
        return turn

    def _check(self, turn: _Turn, at: int, call: ToolCall | InvalidToolCall) -> str:
        """Why a call cannot be run as it is; "" where it is to run."""
        if isinstance(call, InvalidToolCall):
            return f"invalid tool call: {call.reason}"
        if call.name not in turn.names:
            known = ", ".join(map(repr, turn.names)) or "none"
            return f"unknown tool {call.name!r}; known tools: {known}"
        kwargs = self._kwargs.get(call.name) or {}
        try:
            arguments = self._runtime.checks[call.name](call.arguments, kwargs)
        except ToolError as error:
            return str(error)
        turn.pending[at] = msgspec.structs.replace(call, arguments=arguments)
        return ""

    def _refuse(self, turn: _Turn, at: int, fault: str) -> None:
        """Answer a call that does not run."""
        turn.results[at] = error_result(fault)
        now = anyio.current_time()
        self._count(turn, at, now, now, is_refused=True)

    async def _open_tools(self, turn: _Turn) -> None:
        """Open the tools that are used for the first time; where one fails, so do its calls."""
        async with self._opening:  # another conversation may open some meanwhile
            for name in dict.fromkeys(call.name for call in turn.pending.values()):
                if name in self._sessions.opened:
                    continue
                gate, error = self._runtime.gates[name], None
                failure = gate.refuse(anyio.current_time())
                if failure is None:
                    try:
                        await self._sessions.open(name, turn.limit)
                        continue
                    except OpenFailure as raised:
                        failure, error = str(raised), raised
                        gate.note_failure(failure, anyio.current_time())
                    finally:
                        gate.note_cancelled()
                for at in [at for at, call in turn.pending.items() if call.name == name]:
                    del turn.pending[at]
                    self._refuse(turn, at, failure)
                    if error is not None:
                        self._note_failure(name, error)

    async def _run_call(self, turn: _Turn, at: int) -> None:
        """Run a call; those of sessions with the same `serial` wait for each other, in order."""
        serial = self._sessions.opened[turn.pending[at].name].serial
        if serial is None:
            await self._time_call(turn, at)
            return
        async with self._serial.setdefault(id(serial), anyio.Lock(fast_acquire=True)):
            await self._time_call(turn, at)

    async def _time_call(self, turn: _Turn, at: int) -> None:
        call, started = turn.pending[at], anyio.current_time()
        self._running[turn, at] = started
        if turn.events is not None:
            turn.events.started(at, call, started)
        try:
            turn.results[at] = await self._answer(turn, call)
        finally:
            self.idle_since = now = anyio.current_time()
            if self._running.pop((turn, at), None) is not None:  # else it was abandoned
                self.seconds += now - started
                self._count(turn, at, started, now)

    async def _answer(self, turn: _Turn, call: ToolCall) -> ToolResult:
        """The result of a call: of an earlier one, the breaker's, or the tool's own."""
        gate = self._runtime.gates[call.name]
        key = gate.cache_key(call.arguments, self._kwargs.get(call.name, {}))
        cached = gate.find_cached(key)
        if cached is not None:
            return cached
        refusal = gate.refuse(anyio.current_time())
        if refusal is not None:
            return error_result(refusal)
        try:
            result = await self._execute(turn, call)
        except CallError as error:
            logger.debug("tool %r failed: %s", call.name, error, exc_info=error.__cause__)
            gate.note_failure(str(error), anyio.current_time())
            self._note_failure(call.name, error)
            return error_result(str(error))
        except BaseException:
            gate.note_cancelled()
            raise
        gate.note_success()
        gate.cache(key, result)
        return result

    async def _execute(self, turn: _Turn, call: ToolCall) -> ToolResult:
        """The result of the first attempt that does not fail with a transient error.

        The limit of a call begins with its slot, and holds for all attempts.
        """
        session, gate = self._sessions.opened[call.name], self._runtime.gates[call.name]
        policy, what = gate.policy, f"tool {call.name!r}"
        activity = f"{what} of trajectory {self._context.uid}/{self._context.member}"
        limit: Limit | None = None
        for tries in itertools.count(1):
            try:
                async with gate.slot():
                    limit = limit or self._runtime.limit_call(gate, turn.limit)
                    return await attempt(
                        _execute, session, call, limit=limit, what=what, activity=activity
                    )
            except LimitExceeded:
                failure = CallError(
                    describe_timeout(limit.deadline if limit else turn.limit.deadline)
                )
            except CallError as error:
                failure = error
            pause_s = policy.backoff_s * 2 ** (tries - 1)
            is_last = tries > policy.retries or not policy.is_transient(failure.root)
            if is_last or limit is None or anyio.current_time() + pause_s >= limit.deadline.at:
                if tries == 1:
                    raise failure
                raise CallError(f"{failure} (after {tries} attempts)") from failure.__cause__
            await anyio.sleep(pause_s)
        raise AssertionError("unreachable")

    def _count(
        self, turn: _Turn, at: int, began: float, now: float, *, is_refused: bool = False
    ) -> None:
        """Count a call that has its result, or was cancelled, and tell of it: here and only here.

        Args:
            is_refused: Whether it did not run.
        """
        call, result, name = turn.calls[at], turn.results[at], NOT_PARSED
        if isinstance(call, ToolCall):
            name = call.name if call.name in self._tools else UNKNOWN_TOOL
        is_error, tally, seconds = (
            result is None or result.is_error,
            self._runtime.tally,
            now - began,
        )
        self.calls += 1
        self.errors += is_error
        tally.tool_calls += 1
        tally.tool_errors += is_error
        tally.tool(name).calls += 1
        counts = self.counts
        for key, value in (("calls", 1), ("errors", is_error), ("seconds", seconds)):
            path = f"tool/{name}/{key}"
            counts[path] = counts.get(path, 0.0) + value
        longest = f"tool/{name}/seconds_max"
        counts[longest] = max(counts.get(longest, 0.0), seconds)
        if turn.events is not None:
            turn.events.ended(at, call, result, began, now, is_refused=is_refused)

    def _note_failure(self, name: str, error: CallError) -> None:
        """A tool raised, or was too late."""
        tool, cause = self._runtime.tally.tool(name), error.__cause__
        tool.failed += 1
        if not tool.first:
            tool.first = str(error)
            if cause is not None:
                frames = ["Traceback (most recent call last):\n", *format_user_frames(cause)]
                tool.first = "".join([*frames, *traceback.format_exception_only(cause)])

    def note_refused_media(self, name: str) -> None:
        """Count an answer as an error after all: the model is shown none of its media."""
        self.errors += 1
        self._runtime.tally.tool_errors += 1
        path = f"tool/{name}/errors"
        if path in self.counts:
            self.counts[path] += 1

    def abandon(self) -> None:
        """Count calls that were given up and will not end, as cancelled ones."""
        running, self._running = self._running, {}
        for (turn, at), began in running.items():
            self._count(turn, at, began, anyio.current_time())

    def find_stateful(self, calls: Sequence[ToolCall | InvalidToolCall]) -> list[str]:
        """Names of the tools among those called whose answers depend on the calls before them."""
        names = dict.fromkeys(call.name for call in calls if isinstance(call, ToolCall))
        opened = self._sessions.opened
        return [name for name in names if name in opened and self._tools[name].stateful]

    async def calc_rewards(self) -> list[float]:
        """Rewards of the tools that were used, in the order of their first use.

        A tool without a reward has no entry, nor has one whose `calc_reward` fails or takes longer
        than ``limits.tool_s``: that is logged.

        Raises:
            ToolError: The one that failed decides the trajectory's reward.
        """
        return await self._sessions.calc_rewards()

    async def close(self) -> None:
        """Close every session once, the last opened first, each within ``limits.cleanup_s``.

        Shielded from cancellation; errors and overruns are logged, never raised.
        """
        self.is_closed = True
        await self._sessions.close()


async def _execute(session: ToolSession, call: ToolCall) -> ToolResult:
    return normalise_result(await session.execute(call))
