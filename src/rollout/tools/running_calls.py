"""The calls of one trajectory: what runs, where, until when; one result for each of them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rollout.bridge import loop_clock, runs_on_trio
from rollout.errors import LimitExceeded, ToolError
from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
from rollout.tools.attempt import CallError, attempt, attempt_at_once, run_side_by_side
from rollout.tools.call_turn import CallTurn, PlacedCall
from rollout.tools.open_sessions import OpenFailure, OpenSessions, timed_out
from rollout.tools.results import (
    CallSums,
    ToolResult,
    add_metrics,
    error_result,
    named_sums,
    normalise_result,
    with_call,
)
from rollout.tools.tool import ToolContext, ToolContexts
from rollout.types import NOT_PARSED, UNKNOWN_TOOL, InvalidToolCall, ToolCall
from rollout.wait_places import format_user_frames

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from rollout.limits import Limit
    from rollout.tools.call_events import CallEvents
    from rollout.tools.gate import ToolGate
    from rollout.tools.tool import Tool, ToolSession
    from rollout.tools.toolkit import Toolkit
    from rollout.types import Prompt

logger = logging.getLogger("rollout")

_AT_ONCE = contextlib.nullcontext()


class RunningCalls:
    """The part of `TrajectoryTools` that runs calls.

    Attributes:
        kit: What they share with those of other trajectories.
        seconds: Time in calls, on the loop's clock; calls at the same time add up.
        calls: Calls of the model's that have ended, also those that no tool could answer.
        errors: Those of them whose answer is an error, whatever its cause, or that were cancelled.
        is_closed: Whether they were closed.
        idle_since: When the last one ended.
        invalid_in_a_row: Latest calls in a row that could not be run as asked: not parsed, of an
            unknown tool, or with wrong arguments.
    """

    __slots__ = (
        "_breaker_key",
        "_clock",
        "_contexts",
        "_counts",
        "_extra",
        "_is_on_trio",
        "_kwargs",
        "_member",
        "_metrics",
        "_opening",
        "_prompt",
        "_sandbox",
        "_serial",
        "_sessions",
        "_tools",
        "_turns_under_way",
        "_uid",
        "_under_way",
        "calls",
        "errors",
        "idle_since",
        "invalid_in_a_row",
        "is_closed",
        "kit",
        "seconds",
    )

    def __init__(
        self,
        kit: Toolkit,
        tools: Mapping[str, Tool],
        *,
        uid: str,
        member: int,
        kwargs: Mapping[str, Mapping[str, Any]],
        extra: dict[str, Any],
        prompt: Prompt | None = None,
        sandbox: TrajectorySandbox | None = None,
    ) -> None:
        self._sandbox = sandbox or TrajectorySandbox()
        self.seconds, self.idle_since, self.is_closed = 0.0, 0.0, False
        self._under_way: dict[tuple[CallTurn, int], tuple[ToolCall, float]] | None = None
        self.calls = self.errors = self.invalid_in_a_row = self._turns_under_way = 0
        self._clock, self._is_on_trio = loop_clock(), runs_on_trio()
        self.kit, self._tools, self._prompt = kit, tools, prompt
        self._uid, self._member, self._kwargs, self._extra = uid, member, kwargs, extra
        # Made when they are needed: many trajectories wait long before their first call.
        self._metrics: dict[str, float] | None = None
        self._counts: CallSums = ()
        self._breaker_key: object = None
        self._opening: anyio.Lock | None = None
        self._serial: dict[int, anyio.Lock] | None = None
        self._contexts: ToolContexts | None = None
        self._sessions: OpenSessions | None = None

    @property
    def under_way(self) -> Sequence[tuple[str, float]]:
        """Calls that run, or wait for their tool's place: name, and since when."""
        return tuple((call.name, since) for call, since in (self._under_way or {}).values())

    @property
    def metrics(self) -> dict[str, float]:
        """Sums of the numbers that tools measured, as ``tools/TOOL/NAME``."""
        return self._metrics or {}

    @property
    def counts(self) -> dict[str, float]:
        """Of each tool that was called, ``tool/TOOL/{calls,errors,seconds,seconds_max}``."""
        return named_sums(self._counts)

    @property
    def contexts(self) -> ToolContexts:
        """What each tool is opened for."""
        if self._contexts is None:
            context = ToolContext(
                uid=self._uid,
                member=self._member,
                threads=self.kit.threads,
                prompt=self._prompt,
                processes=self.kit.processes,
                extra=self._extra,
                sandbox=self._sandbox,
            )
            self._contexts = ToolContexts(context, self._kwargs)
        return self._contexts

    @property
    def sessions(self) -> OpenSessions:
        """The tools that are open."""
        if self._sessions is None:
            limits = self.kit.limits
            self._sessions = OpenSessions(
                self._tools, self.contexts, tool_s=limits.tool_s, cleanup_s=limits.cleanup_s
            )
        return self._sessions

    async def run(
        self,
        calls: Sequence[ToolCall | InvalidToolCall],
        *,
        limit: Limit,
        offered: Collection[str] | None = None,
        told: CallEvents | None = None,
    ) -> list[ToolResult]:
        """The results of one turn's calls, which run at the same time: result i answers call i.

        Every fault is an error result: an invalid call, an unknown tool, wrong arguments, an
        exception, a call past ``limits.tool_s`` or beyond ``agent.max_parallel_calls``. Texts are
        truncated. Cancellation ends the calls and leaves the sessions open, for `close`.

        Args:
            calls: In the order in which the model wrote them.
            limit: The turn's, within which all must have been answered.
            offered: Names of the tools that could be called; None: all.
            told: Tells of them; None where nobody reads.

        Raises:
            LimitExceeded: `limit` was over; every call was cancelled and has ended.
            ToolError: The trajectory's tools are closed.
        """
        if self.is_closed:
            raise ToolError("the tools of this trajectory are closed")
        turn, sessions = self._turn(calls, limit, offered, told), self.sessions
        self._turns_under_way += 1
        try:
            with limit.open(None, ""):  # it may have ended other blocks: one ends one
                if turn.unopened(sessions):
                    await self._open_tools(turn)
                turn.sessions = sessions.opened
                if turn.pending:
                    await self._run_lanes(turn)
        finally:
            self._turns_under_way -= 1
        within = self.kit.limits.within
        return self._count(calls, [within(result) for result in turn.results if result is not None])

    def _count(
        self, calls: Sequence[ToolCall | InvalidToolCall], results: list[ToolResult]
    ) -> list[ToolResult]:
        for call, result in zip(calls, results, strict=True):
            if result.metrics and isinstance(call, ToolCall):
                self._metrics = self._metrics or {}
                add_metrics(self._metrics, call.name, result.metrics)
        return results

    def _turn(
        self,
        calls: Sequence[ToolCall | InvalidToolCall],
        limit: Limit,
        offered: Collection[str] | None,
        told: CallEvents | None = None,
    ) -> CallTurn:
        known: Collection[str] = self._tools
        if offered is not None:
            known = [name for name in self._tools if name in offered]
        turn = CallTurn(len(calls), limit, known, told)
        for position, call in enumerate(calls):
            self._admit(turn, position, call)
            if turn.results[position] is not None:
                now = self._clock()
                self._ended(turn, position, call, now, now, is_refused=True)
        return turn

    def _ended(
        self,
        turn: CallTurn,
        position: int,
        call: ToolCall | InvalidToolCall,
        began: float,
        now: float,
        *,
        is_refused: bool = False,
    ) -> None:
        """Count a call that has its result, or was cancelled, and tell of it: here and only here.

        Args:
            is_refused: Whether it did not run.
        """
        result, name = turn.results[position], NOT_PARSED
        if isinstance(call, ToolCall):
            name = call.name if call.name in self._tools else UNKNOWN_TOOL
        is_error, tally = result is None or result.is_error, self.kit.tally
        self.calls += 1
        self.errors += is_error
        tally.tool_calls += 1
        tally.tool_errors += is_error
        self._counts = with_call(self._counts, name, result, now - began)
        tally.tool(name).calls += 1
        if turn.told is not None:
            turn.told.ended(position, call, result, began, now, is_refused=is_refused)

    def abandon(self) -> None:
        """Count calls that were given up and will not end, as cancelled ones."""
        under_way, self._under_way = self._under_way, None
        for (turn, position), (call, began) in (under_way or {}).items():
            self._ended(turn, position, call, began, self._clock())

    def _note_failure(self, call: ToolCall, error: CallError) -> None:
        """A tool raised, or was too late."""
        tool, cause = self.kit.tally.tool(call.name), error.__cause__
        tool.failed += 1
        if not tool.first:
            tool.first = str(error)
            if cause is not None:
                what = traceback.format_exception_only(cause)
                frames = ["Traceback (most recent call last):\n", *format_user_frames(cause)]
                tool.first = "".join([*frames, *what])

    def _admit(self, turn: CallTurn, position: int, call: ToolCall | InvalidToolCall) -> None:
        """Let a call run, or answer it; an invalid one counts, one too many does not."""
        limit = self.kit.limits.max_parallel_calls
        if isinstance(call, InvalidToolCall):
            self._refuse(turn, position, f"invalid tool call: {call.reason}")
        elif position >= limit:
            turn.results[position] = error_result(
                f"not executed: at most {limit} calls per turn (agent.max_parallel_calls); "
                f"call it again"
            )
        elif (fault := self.kit.fault(call, turn.known, self.contexts)) is not None:
            self._refuse(turn, position, fault)
        else:
            self.invalid_in_a_row = 0
            turn.pending.append((position, call))

    def _refuse(self, turn: CallTurn, position: int, fault: str) -> None:
        self.invalid_in_a_row += 1
        turn.results[position] = error_result(fault)

    async def _open_tools(self, turn: CallTurn) -> None:
        """Open the tools that are used for the first time; where one fails, so do its calls."""
        if all(self.sessions.opens_at_once(call.name) for _, call in turn.pending):
            await self._open_unopened(turn)  # nobody else can come in between
            return
        opening = self._opening = self._opening or anyio.Lock(fast_acquire=True)
        try:
            async with opening:
                await self._open_unopened(turn)  # others may have opened some meanwhile
        finally:
            if not opening.locked():  # nobody waits for it
                self._opening = None

    async def _open_unopened(self, turn: CallTurn) -> None:
        unopened = turn.unopened(self.sessions)
        for name in dict.fromkeys(call.name for _, call in unopened):
            breaker = self.kit.gates[name].breaker
            failure, raised = breaker.refusal(self._clock()), None
            if failure is None:
                try:
                    is_alone = self._turns_under_way == 1
                    await self.sessions.open(name, turn.limit, is_alone=is_alone)
                except OpenFailure as error:
                    failure, raised = str(error), error
                    breaker.fail(failure, error.root, self._breaker_identity(), self._clock())
                finally:
                    breaker.forget()
            if failure is not None:
                for position, call in unopened:
                    if call.name == name:
                        turn.answer(position, error_result(failure))
                        now = self._clock()
                        self._ended(turn, position, call, now, now, is_refused=True)
                        if raised is not None:
                            self._note_failure(call, raised)

    async def _run_lanes(self, turn: CallTurn) -> None:
        lanes = turn.lanes()
        if len(lanes) > 1:
            await run_side_by_side([partial(self._run_lane, turn, lane) for lane in lanes])
        else:
            await self._run_lane(turn, *lanes)

    async def _run_lane(self, turn: CallTurn, lane: list[PlacedCall]) -> None:
        """Run calls that must not run at once."""
        for placed in lane:
            await self._run_call(turn, *placed)

    async def _run_call(self, turn: CallTurn, position: int, call: ToolCall) -> None:
        started = self._clock()
        owner = self.contexts[call.name]
        activity = f"tool {call.name!r} of trajectory {owner.uid}/{owner.member}"  # noqa: F841
        self._under_way = self._under_way or {}
        self._under_way[turn, position] = call, started
        if turn.told is not None:
            turn.told.started(position, call, started)
        try:
            turn.results[position] = await self._result_of(turn, call, owner.kwargs, started)
        finally:
            self.idle_since = now = self._clock()
            if self._under_way is not None:  # else it was abandoned
                del self._under_way[turn, position]
                self._under_way = self._under_way or None
                self.seconds += now - started
                self._ended(turn, position, call, started, now)

    async def _result_of(
        self, turn: CallTurn, call: ToolCall, kwargs: Mapping[str, Any], now: float
    ) -> ToolResult:
        gate = self.kit.gates[call.name]
        key = gate.key(call.arguments, kwargs) if gate.policy.cache_size else None
        if key is not None and (result := gate.kept(key)) is not None:
            return result
        refusal = gate.breaker.refusal(now)
        if refusal is not None:
            return error_result(refusal)
        try:
            result = await self._attempts(turn, call, gate)
        except CallError as error:
            logger.debug("tool %r failed: %s", call.name, error, exc_info=error.__cause__)
            gate.breaker.fail(str(error), error.root, self._breaker_identity(), self._clock())
            self._note_failure(call, error)
            return error_result(str(error))
        except BaseException:
            gate.breaker.forget()
            raise
        gate.breaker.succeed()
        if key is not None:
            gate.keep(key, result)
        return result

    async def _attempts(self, turn: CallTurn, call: ToolCall, gate: ToolGate) -> ToolResult:
        """The result of the first attempt that does not fail with a transient error."""
        session, policy = turn.sessions[call.name], gate.policy
        limit: Limit | None = None
        for tries in itertools.count(1):
            try:
                async with self._place(session, gate):
                    limit = limit or self.kit.limits.limit_call(call.name, policy, turn.limit)
                    if gate.never_waits:
                        return await attempt_at_once(_answer, session, call)
                    return await self._execute_in_time(session, call, limit, gate.what)
            except CallError as error:
                pause_s = policy.backoff_s * 2 ** (tries - 1)
                is_last = tries > policy.retries or not policy.is_transient(error.root)
                if is_last or limit is None or self._clock() + pause_s >= limit.deadline.at:
                    raise error if tries == 1 else error.after(tries) from error.__cause__
            await anyio.sleep(pause_s)
        raise AssertionError("unreachable")

    async def _execute_in_time(
        self, session: ToolSession, call: ToolCall, limit: Limit, what: str
    ) -> ToolResult:
        try:
            return await attempt(_answer, session, call, limit=limit, what=what)
        except LimitExceeded:
            raise CallError(timed_out(limit.deadline)) from None

    def _place(self, session: ToolSession, gate: ToolGate) -> AbstractAsyncContextManager[object]:
        """Where a call may run at last; most have nothing to wait for."""
        if session.serial is None:
            return gate.place() if gate.has_queue else _AT_ONCE
        self._serial = self._serial or {}
        lock = self._serial.setdefault(id(session.serial), anyio.Lock(fast_acquire=True))
        return gate.place_in_line(lock)

    def _breaker_identity(self) -> object:
        """Which trajectory it is, to breakers; they may remember it for longer than it lives."""
        self._breaker_key = self._breaker_key or object()
        return self._breaker_key


async def _answer(session: ToolSession, call: ToolCall) -> ToolResult:
    return normalise_result(await session.execute(call))
