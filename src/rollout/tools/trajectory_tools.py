"""The tools of one trajectory: calls in, one result for each of them out."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.containment import Contained, containment_here, current_containment
from rollout.errors import LimitExceeded, ToolError
from rollout.limits import Clock, Deadline, Limit
from rollout.observe.tally import Tally
from rollout.tools.attempt import (
    CallError,
    attempt,
    conclude,
    describe_timeout,
    run_side_by_side,
)
from rollout.tools.function_tools import FunctionTool
from rollout.tools.policy import ToolGate
from rollout.tools.processes import ToolProcesses
from rollout.tools.results import (
    ToolResult,
    add_metrics,
    error_result,
    normalise_result,
    read_reward,
)
from rollout.tools.tool import ToolContext, ToolSession
from rollout.tools.truncate import TruncateSide, truncate_text
from rollout.types import NOT_PARSED, UNKNOWN_TOOL, InvalidToolCall, ToolCall
from rollout.utf8 import encodable
from rollout.wait_places import format_user_frames
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rollout.tools.call_events import CallEvents
    from rollout.tools.results import Answers
    from rollout.tools.tool import Tool

logger = logging.getLogger("rollout")


class ToolRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """What the tools of all trajectories share; see `ToolExecutor`.

    Attributes:
        checks: By tool: the arguments that it gets, of the model's and the prompt's kwargs.
        gates: By tool.
    """

    checks: Mapping[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]]
    gates: Mapping[str, ToolGate]
    threads: WorkerThreads
    processes: ToolProcesses
    tally: Tally
    max_parallel_calls: int
    max_response_length: int
    truncate_side: TruncateSide
    tool_s: float | None
    cleanup_s: float


class _Turn:
    """The calls of one turn, as they are `run`.

    Attributes:
        results: By the position of the call; None until it has one.
        pending: Positions of the calls that run, with their checked arguments.
    """

    def __init__(
        self, calls: Sequence[ToolCall | InvalidToolCall], limit: Limit, events: CallEvents | None
    ) -> None:
        self.calls, self.limit, self.events = calls, limit, events
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
        reward: The sum of what tools gave that decide the trajectory's reward; None where none did.
        is_closed: Whether they were closed.
        metrics: Sums of the numbers that tools measured, as ``tools/TOOL/NAME``.
        counts: Of each tool that was called, ``tool/TOOL/{calls,errors,seconds,seconds_max}``.
    """

    def __init__(
        self,
        runtime: ToolRuntime,
        tools: Mapping[str, Tool],
        context: ToolContext,
        kwargs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._runtime, self._tools, self._context, self._kwargs = runtime, tools, context, kwargs
        self._opened: dict[str, ToolSession] = {}  # in the order in which they were opened
        #: Of sessions that wait in the task in which they were opened, to be closed there.
        self._tasks: dict[str, Contained[None]] = {}
        self._opening = anyio.Lock(fast_acquire=True)
        self._serial: dict[int, anyio.Lock] = {}
        self._running: dict[tuple[_Turn, int], float] = {}
        self.metrics: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self.seconds, self.idle_since, self.is_closed = 0.0, 0.0, False
        self.calls = self.errors = self.invalid_in_a_row = 0
        self.reward: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools offered to this trajectory."""
        return tuple(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools offered to this trajectory."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def under_way(self) -> Sequence[tuple[str, float]]:
        """Calls that run, or wait for a slot: name, and since when."""
        return [(turn.pending[at].name, since) for (turn, at), since in self._running.items()]

    def has_open_sessions(self) -> bool:
        """Whether a tool is open that may hold something: plain functions hold nothing."""
        return any(not isinstance(self._tools[name], FunctionTool) for name in self._opened)

    async def open_first(self) -> list[str | Sequence[Mapping[str, Any]]]:
        """Open and begin the tools with `Tool.opens_first`; what they observe, in their order.

        What `ToolSession.begin` raises leaves as itself.

        Raises:
            ToolError: One could not be opened.
        """
        for name, tool in self._tools.items():
            if tool.opens_first and name not in self._opened:
                try:  # `limits.trajectory_s` bounds it
                    await self._open(name, Clock(), is_bounded=False)
                except CallError as error:
                    raise ToolError(str(error)) from error.__cause__
        observations = [await each.begin() for each in list(self._opened.values())]
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
        turn = _Turn(calls, limit, events)
        self._admit(turn, offered)
        await self._open_tools(turn)
        await run_side_by_side([partial(self._run_call, turn, at) for at in turn.pending])
        return [self._bound_text(each) for each in turn.results if each is not None]

    def recall(
        self,
        calls: Sequence[ToolCall | InvalidToolCall],
        answers: Answers,
        offered: Collection[str] | None = None,
    ) -> list[ToolResult]:
        """As `run`, with the answers of before; no tool runs."""
        turn = _Turn(calls, Clock(), None)
        self._admit(turn, offered)
        self.seconds += answers.seconds
        for at in turn.pending:
            turn.results[at] = answers.results[at]
            self._count(turn, at, 0.0, answers.seconds / len(turn.pending))
        return list(answers.results)

    def _bound_text(self, result: ToolResult) -> ToolResult:
        text, limit = result.text, self._runtime.max_response_length
        if len(text) > limit:
            text = truncate_text(text, limit, self._runtime.truncate_side)
        text = encodable(text)
        return result if text is result.text else msgspec.structs.replace(result, text=text)

    def _admit(self, turn: _Turn, offered: Collection[str] | None) -> None:
        """Check the calls of a turn; those that cannot run are answered."""
        names = [name for name in self._tools if offered is None or name in offered]
        most = self._runtime.max_parallel_calls
        too_many = (
            f"not executed: at most {most} calls per turn (agent.max_parallel_calls); call it again"
        )
        for at, call in enumerate(turn.calls):
            if at >= most and isinstance(call, ToolCall):  # nor does it count as invalid
                self._refuse(turn, at, too_many)
                continue
            try:
                turn.pending[at] = self._check(call, names)
                self.invalid_in_a_row = 0
            except ToolError as error:
                self.invalid_in_a_row += 1
                self._refuse(turn, at, str(error))

    def _check(self, call: ToolCall | InvalidToolCall, names: Sequence[str]) -> ToolCall:
        """The call as its tool gets it, of the tools of these names.

        Raises:
            ToolError: It cannot be run as it is.
        """
        if isinstance(call, InvalidToolCall):
            raise ToolError(f"invalid tool call: {call.reason}")
        if call.name not in names:
            known = ", ".join(map(repr, names)) or "none"
            raise ToolError(f"unknown tool {call.name!r}; known tools: {known}")
        kwargs = self._kwargs.get(call.name) or {}
        arguments = self._runtime.checks[call.name](call.arguments, kwargs)
        return msgspec.structs.replace(call, arguments=arguments)

    def _refuse(self, turn: _Turn, at: int, fault: str) -> None:
        """Answer a call that does not run."""
        turn.results[at] = error_result(fault)
        now = anyio.current_time()
        self._count(turn, at, now, now, is_refused=True)

    async def _open_tools(self, turn: _Turn) -> None:
        """Open the tools that are used for the first time; where one fails, so do its calls."""
        opened = self._opened
        if all(call.name in opened for call in turn.pending.values()):
            return
        with turn.limit.open(None, ""):
            async with self._opening:  # another conversation may open some meanwhile
                for name in dict.fromkeys(call.name for call in turn.pending.values()):
                    failure = "" if name in opened else await self._try_to_open(name, turn)
                    for at in [at for at, call in turn.pending.items() if call.name == name]:
                        if failure:
                            del turn.pending[at]
                            self._refuse(turn, at, failure)

    async def _try_to_open(self, name: str, turn: _Turn) -> str:
        """Open a tool; why that failed, or was not tried, for the model."""
        refusal = self._runtime.gates[name].describe_refusal()
        if refusal is not None:
            return refusal
        try:
            await self._open(name, turn.limit)
        except CallError as error:
            self._note_failure(name, error)
            return str(error)
        return ""

    async def _open(self, name: str, turn: Limit, *, is_bounded: bool = True) -> None:
        """Open a tool, within ``limits.tool_s`` where it `is_bounded`, for the calls of a turn.

        A session is closed in the task in which it was opened: it may have a task group open.

        Raises:
            CallError: It raised, took longer than ``limits.tool_s``, or returned no session.
            LimitExceeded: `turn` was over.
        """
        tool, context = self._tools[name], self._context
        if kwargs := self._kwargs.get(name):
            context = msgspec.structs.replace(context, kwargs=dict(kwargs))
        limit = turn.open(self._runtime.tool_s if is_bounded else None, "limits.tool_s")
        stays = current_containment() is not None  # else its tasks end with the block below
        try:
            if isinstance(tool, FunctionTool):  # which has nothing to wait for
                self._opened[name] = tool.open_session(context)
                return
            async with containment_here() as containment:
                task = Contained[None](containment, f"open of tool {name!r}")

                async def serve() -> None:
                    session = await tool.open(context)
                    if not isinstance(session, ToolSession):
                        kind = type(session).__name__
                        raise ToolError(f"open returned {kind}; expected a ToolSession")
                    self._opened[name] = session
                    if stays and type(session).close is not ToolSession.close:
                        limit.release()
                        self._tasks[name] = task
                        await task.pause()
                        await session.close()

                await conclude(task, task.run(serve), limit)
        except LimitExceeded:
            if turn.is_over:
                raise
            why = describe_timeout(limit.deadline)
            raise CallError(f"could not open {name!r}: {why}") from None
        except Exception as error:
            raise CallError(f"could not open {name!r}: {error}") from error

    async def _run_call(self, turn: _Turn, at: int) -> None:
        """Run a call; those of sessions with the same `serial` wait for each other, in order."""
        call = turn.pending[at]
        gate, serial, lock = self._runtime.gates[call.name], self._opened[call.name].serial, None
        if serial is not None:
            lock = self._serial.setdefault(id(serial), anyio.Lock(fast_acquire=True))
        # The limit of a call lies within the turn's, which counts also while it waits for others.
        waits = serial is not None or gate.has_queue
        with turn.limit.open(None, "") if waits else nullcontext():
            async with lock or nullcontext():
                await self._time_call(turn, at, gate)

    async def _time_call(self, turn: _Turn, at: int, gate: ToolGate) -> None:
        call, began = turn.pending[at], anyio.current_time()
        self._running[turn, at] = began
        if turn.events is not None:
            turn.events.started(at, call, began)
        try:
            turn.results[at] = await self._answer(turn, call, gate)
        finally:
            self.idle_since = now = anyio.current_time()
            if self._running.pop((turn, at), None) is not None:  # else it was abandoned
                self.seconds += now - began
                self._count(turn, at, began, now)

    async def _answer(self, turn: _Turn, call: ToolCall, gate: ToolGate) -> ToolResult:
        """The result of a call: of an earlier one, the breaker's, or the tool's own."""
        key = gate.make_cache_key(call.arguments, self._kwargs.get(call.name, {}))
        cached, refusal = gate.find_cached(key), gate.describe_refusal()
        if cached is not None:
            return cached
        if refusal is not None:
            return error_result(refusal)
        try:
            result = await self._execute(turn, call, gate)
        except CallError as error:
            logger.debug("tool %r failed: %s", call.name, error, exc_info=error.__cause__)
            self._note_failure(call.name, error)
            return error_result(str(error))
        gate.note_success()
        gate.cache(key, result)
        return result

    async def _execute(self, turn: _Turn, call: ToolCall, gate: ToolGate) -> ToolResult:
        """The result of the first attempt that does not fail with a transient error.

        The limit of a call begins with its slot, and holds for all attempts.

        Raises:
            CallError: The last attempt failed, or the limit was over.
            LimitExceeded: The turn's limit was over.
        """
        session, policy, limit = self._opened[call.name], gate.policy, None
        what = f"tool {call.name!r}"
        activity = f"{what} of trajectory {self._context.uid}/{self._context.member}"
        for tries in itertools.count(1):
            async with gate.slot() if gate.has_queue else nullcontext():
                if limit is None and policy.timeout_s is None:
                    limit = turn.limit.open(self._runtime.tool_s, "limits.tool_s")
                elif limit is None:
                    limit = turn.limit.open(policy.timeout_s, f"timeout_s of {call.name!r}")
                try:
                    return await attempt(
                        _execute, session, call, limit=limit, what=what, activity=activity
                    )
                except LimitExceeded:
                    if turn.limit.is_over:
                        raise
                    failure = CallError(describe_timeout(limit.deadline))
                except CallError as error:
                    failure = error
            pause_s = policy.backoff_s * 2 ** (tries - 1)
            is_last = tries > policy.retries or not policy.is_transient(failure.root)
            if is_last or anyio.current_time() + pause_s >= limit.deadline.at:
                if tries == 1:
                    raise failure
                raise CallError(f"{failure} (after {tries} attempts)") from failure.__cause__
            await anyio.sleep(pause_s)
        raise AssertionError("unreachable")

    def _count(
        self, turn: _Turn, at: int, began: float, now: float, *, is_refused: bool = False
    ) -> None:
        """Count a call that has its result, or was cancelled, and emit its event: here only.

        Args:
            is_refused: Whether it did not run.
        """
        call, result, name = turn.calls[at], turn.results[at], NOT_PARSED
        if isinstance(call, ToolCall):
            name = call.name if call.name in self._tools else UNKNOWN_TOOL
        is_error, tally = result is None or result.is_error, self._runtime.tally
        self.calls += 1
        self.errors += is_error
        tally.tool_calls += 1
        tally.tool_errors += is_error
        tally.tool(name).calls += 1
        counts, prefix = self.counts, f"tool/{name}"
        for key, value in (("calls", 1), ("errors", is_error), ("seconds", now - began)):
            counts[f"{prefix}/{key}"] = counts.get(f"{prefix}/{key}", 0.0) + value
        longest = f"{prefix}/seconds_max"
        counts[longest] = max(counts.get(longest, 0.0), now - began)
        if result is not None and result.metrics:
            add_metrics(self.metrics, name, result.metrics)
        if turn.events is not None:
            turn.events.ended(at, call, result, began, now, is_refused=is_refused)

    def _note_failure(self, name: str, error: CallError) -> None:
        """A tool raised, or was too late."""
        self._runtime.gates[name].note_failure(str(error))
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
        opened = self._opened
        return [name for name in names if name in opened and self._tools[name].stateful]

    async def calc_rewards(self) -> list[float]:
        """Rewards of the tools that were used, in the order of their first use; sets `reward`.

        A tool without a reward has no entry, nor has one whose `calc_reward` fails or takes longer
        than ``limits.tool_s``: that is logged.

        Raises:
            ToolError: The one that failed decides the trajectory's reward.
        """
        rewards: dict[str, float | None] = {}
        failures: list[ToolError] = []

        async def judge(name: str) -> None:
            try:
                rewards[name] = await self._calc_reward(name)
            except ToolError as failure:
                failures.append(failure)

        judges = self._find_overriding("calc_reward")
        await run_side_by_side([partial(judge, name) for name in judges])
        if failures:
            raise failures[0]
        given = {name: reward for name in judges if (reward := rewards[name]) is not None}
        decided = [given[name] for name in given if self._opened[name].decides_reward]
        self.reward = sum(decided) if decided else None
        return list(given.values())

    async def _calc_reward(self, name: str) -> float | None:
        session, what = self._opened[name], f"calc_reward of tool {name!r}"
        limit = Clock(Deadline.after(self._runtime.tool_s, "limits.tool_s"))
        try:
            value: Any = await attempt(session.calc_reward, limit=limit, what=what)
        except (CallError, LimitExceeded) as error:
            if session.decides_reward:
                raise ToolError(f"tool {name!r}: calc_reward failed: {error}") from error
            logger.warning("tool %r: calc_reward failed: %s", name, error)
            return None
        reward = read_reward(value)
        if reward is None and value is not None:
            text = "tool %r: calc_reward returned %.80r; expected a finite number"
            logger.warning(text, name, value)
        return reward

    def _find_overriding(self, method: str) -> list[str]:
        """Names of the open sessions that do not leave this method as it is."""
        default = getattr(ToolSession, method)
        return [n for n, each in self._opened.items() if getattr(type(each), method) is not default]

    async def close(self) -> None:
        """Close every session once, the last opened first, each within ``limits.cleanup_s``.

        Shielded from cancellation; errors and overruns are logged. Ctrl-C (and on asyncio a bare
        `Task.cancel`) ends one session's close at once and is raised when all have had theirs.
        Where a close is given up with its task, another call closes the others.
        """
        self.is_closed = True
        interruption: BaseException | None = None
        for name in reversed(self._find_overriding("close")):
            session, what = self._opened.pop(name), f"close of tool {name!r}"
            limit = Clock(Deadline.after(self._runtime.cleanup_s, "limits.cleanup_s"))
            try:
                with anyio.CancelScope(shield=True):
                    task = self._tasks.pop(name, None)
                    if task is None:
                        await attempt(session.close, limit=limit, what=what)
                    else:
                        task.what = what
                        await conclude(task, task.finish(), limit)
            except (CallError, LimitExceeded) as error:
                logger.warning("tool %r: close failed: %s", name, error)
            except BaseException as error:
                interruption = interruption or error
        self._opened.clear()
        if interruption is not None:
            raise interruption


async def _execute(session: ToolSession, call: ToolCall) -> ToolResult:
    return normalise_result(await session.execute(call))
