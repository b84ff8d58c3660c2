"""The tools of one trajectory: calls in, one result for each of them out.

The way of a call: `TrajectoryTools.run` checks it, opens its tool at the first use and starts it
beside the other calls of its turn; `_execute` waits for the tool's `ToolGate` and tries as often as
the policy says; `attempt` runs the foreign code within the call's limit; `normalise_result` makes
the `ToolResult` of what it returned, or the error becomes one.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.containment import Contained, current_containment
from rollout.errors import LimitExceeded, ToolError
from rollout.limits import Clock, Deadline, Limit
from rollout.observe.tally import Tally
from rollout.tools.attempt import CallError, attempt, conclude, run_side_by_side
from rollout.tools.call_events import CallEvents
from rollout.tools.function_tools import FunctionTool
from rollout.tools.policy import ToolGate
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

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Sequence

    from rollout.tools.results import Answers
    from rollout.tools.tool import Tool

logger = logging.getLogger("rollout")


class ToolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the tools of all trajectories share; the other fields are `ToolExecutor`'s arguments.

    Attributes:
        checks: By tool: the arguments that it gets, of the model's and the prompt's kwargs.
        gates: By tool.
    """

    checks: Mapping[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]]
    gates: Mapping[str, ToolGate]
    tally: Tally
    max_parallel_calls: int
    max_response_length: int
    truncate_side: TruncateSide
    tool_s: float | None
    cleanup_s: float


class _Call(msgspec.Struct, eq=False, gc=False):
    """One call of a turn.

    Attributes:
        call: As the model wrote it.
        checked: With the arguments that the tool gets; None where the call cannot run.
        result: None until it is answered.
    """

    position: int
    call: ToolCall | InvalidToolCall
    events: CallEvents | None = None
    checked: ToolCall | None = None
    result: ToolResult | None = None
    began: float = 0.0

    @property
    def name(self) -> str:
        """The tool's, of a call that was parsed."""
        return self.call.name if isinstance(self.call, ToolCall) else NOT_PARSED


class _Counts(msgspec.Struct):
    """Figures of the calls of one tool that have ended."""

    calls: float = 0.0
    errors: float = 0.0
    seconds: float = 0.0
    seconds_max: float = 0.0


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
    """

    def __init__(
        self,
        settings: ToolSettings,
        tools: Mapping[str, Tool],
        context: ToolContext,
        kwargs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._settings, self._tools, self._context, self._kwargs = settings, tools, context, kwargs
        self._opened: dict[str, ToolSession] = {}  # in the order in which they were opened
        #: Of sessions that wait in the task in which they were opened, to be closed there.
        self._tasks: dict[str, Contained[None]] = {}
        self._opening = anyio.Lock(fast_acquire=True)
        self._serial: dict[int, anyio.Lock] = {}
        self._running: dict[_Call, None] = {}
        self._counts: dict[str, _Counts] = {}
        self.metrics: dict[str, float] = {}
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
    def counts(self) -> dict[str, float]:
        """Of each tool that was called, ``tool/TOOL/{calls,errors,seconds,seconds_max}``."""
        return {
            f"tool/{name}/{key}": value
            for name, counts in self._counts.items()
            for key, value in msgspec.structs.asdict(counts).items()
        }

    @property
    def under_way(self) -> Sequence[tuple[str, float]]:
        """Calls that run, or wait for a slot: name, and since when."""
        return [(each.name, each.began) for each in self._running]

    def has_open_sessions(self) -> bool:
        """Whether a tool is open that may hold something: plain functions hold nothing."""
        return any(not isinstance(self._tools[name], FunctionTool) for name in self._opened)

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
        turn = [_Call(position, call, events) for position, call in enumerate(calls)]
        self._check_calls(turn, offered)
        if any(each.checked is not None and each.name not in self._opened for each in turn):
            await self._open_tools(turn, limit)
        pending = [each for each in turn if each.checked is not None]
        if len(pending) == 1:
            await self._run_call(pending[0], limit)
        else:
            await run_side_by_side([partial(self._run_call, each, limit) for each in pending])
        return [self._bound_text(each.result) for each in turn if each.result is not None]

    def recall(
        self,
        calls: Sequence[ToolCall | InvalidToolCall],
        answers: Answers,
        offered: Collection[str] | None = None,
    ) -> list[ToolResult]:
        """As `run`, with the answers of before; no tool runs."""
        turn = [_Call(position, call) for position, call in enumerate(calls)]
        self._check_calls(turn, offered)
        self.seconds += answers.seconds
        pending = [each for each in turn if each.checked is not None]
        for each in pending:
            each.result = answers.results[each.position]
            self._count(each, answers.seconds / len(pending))
        return list(answers.results)

    def _bound_text(self, result: ToolResult) -> ToolResult:
        text, limit = result.text, self._settings.max_response_length
        if len(text) > limit:
            text = truncate_text(text, limit, self._settings.truncate_side)
        text = encodable(text)
        return result if text is result.text else msgspec.structs.replace(result, text=text)

    def _check_calls(self, turn: Sequence[_Call], offered: Collection[str] | None) -> None:
        """Check the calls of a turn; those that cannot run are answered."""
        most = self._settings.max_parallel_calls
        for each in turn:
            if each.position >= most and isinstance(each.call, ToolCall):  # nor is it invalid
                limit = f"at most {most} calls per turn (agent.max_parallel_calls)"
                self._refuse(each, error_result(f"not executed: {limit}; call it again"))
                continue
            try:
                each.checked = self._check(each.call, offered)
                self.invalid_in_a_row = 0
            except ToolError as error:
                self.invalid_in_a_row += 1
                self._refuse(each, error_result(str(error)))

    def _check(self, call: ToolCall | InvalidToolCall, offered: Collection[str] | None) -> ToolCall:
        """The call as its tool gets it.

        Raises:
            ToolError: It cannot be run as it is.
        """
        if isinstance(call, InvalidToolCall):
            raise ToolError(f"invalid tool call: {call.reason}")
        if call.name not in self._tools or not (offered is None or call.name in offered):
            names = [repr(name) for name in self._tools if offered is None or name in offered]
            known = ", ".join(names) or "none"
            raise ToolError(f"unknown tool {call.name!r}; known tools: {known}")
        check = self._settings.checks[call.name]
        arguments = check(call.arguments, self._kwargs.get(call.name) or {})
        return msgspec.structs.replace(call, arguments=arguments)

    def _refuse(self, call: _Call, result: ToolResult) -> None:
        """Answer a call that does not run."""
        call.checked, call.result = None, result
        call.began = anyio.current_time()
        self._count(call, 0.0, is_refused=True)

    async def _open_tools(self, turn: Sequence[_Call], limit: Limit) -> None:
        """Open the tools that are used for the first time; where one fails, so do its calls."""
        with limit.open(None, ""):
            async with self._opening:  # another conversation may open some meanwhile
                for name in dict.fromkeys(each.name for each in turn if each.checked is not None):
                    refusal = self._settings.gates[name].find_refusal()
                    if name in self._opened:
                        continue
                    if refusal is None:
                        try:
                            await self._open(name, limit, self._settings.tool_s)
                            continue
                        except CallError as error:
                            refusal = self._note_failure(name, error)
                    for each in turn:
                        if each.checked is not None and each.name == name:
                            self._refuse(each, refusal)

    async def open_first(self) -> list[str | Sequence[Mapping[str, Any]]]:
        """Open and begin the tools with `Tool.opens_first`; what they observe, in their order.

        What `ToolSession.begin` raises leaves as itself.

        Raises:
            ToolError: One could not be opened.
        """
        for name, tool in self._tools.items():
            if tool.opens_first and name not in self._opened:
                try:
                    await self._open(name, Clock(), None)  # `limits.trajectory_s` bounds it
                except CallError as error:
                    raise ToolError(str(error)) from error.__cause__
        observations = [await each.begin() for each in list(self._opened.values())]
        return [each for each in observations if each is not None]

    async def _open(self, name: str, turn: Limit, tool_s: float | None) -> None:
        """Open a tool within `tool_s`, for the calls of a turn.

        Raises:
            CallError: It raised, took longer, or returned no session.
            LimitExceeded: `turn` was over.
        """
        tool, context = self._tools[name], self._context
        if kwargs := self._kwargs.get(name):
            context = msgspec.structs.replace(context, kwargs=dict(kwargs))
        limit = turn.open(tool_s, "limits.tool_s")
        try:
            if isinstance(tool, FunctionTool):  # which has nothing to wait for
                self._opened[name] = tool.open_session(context)
                return
            what = f"open of tool {name!r}"
            if (containment := current_containment()) is None:
                await attempt(self._open_session, tool, context, limit=limit, what=what)
                return
            # The session is closed in the task in which it was opened: it may have a group open.
            task = Contained[None](containment, what)

            async def serve() -> None:
                session = await self._open_session(tool, context)
                if type(session).close is not ToolSession.close:
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

    async def _open_session(self, tool: Tool, context: ToolContext) -> ToolSession:
        session = await tool.open(context)
        if not isinstance(session, ToolSession):
            raise ToolError(f"open returned {type(session).__name__}; expected a ToolSession")
        self._opened[tool.name] = session
        return session

    def _run_call(self, call: _Call, turn: Limit) -> Coroutine[Any, Any, None]:
        """Run a call: at once, or where it may have to wait for others before."""
        serial, gate = self._opened[call.name].serial, self._settings.gates[call.name]
        if serial is None and not gate.has_queue:
            return self._answer(call, turn)
        return self._answer_in_order(call, serial, turn)

    async def _answer_in_order(self, call: _Call, serial: object | None, turn: Limit) -> None:
        """Calls of sessions with the same `serial` wait for each other, in order."""
        lock = None
        if serial is not None:
            lock = self._serial.setdefault(id(serial), anyio.Lock(fast_acquire=True))
        # The limit of a call lies within the turn's, which counts also while it waits for others.
        with turn.open(None, ""):
            async with lock or nullcontext():
                await self._answer(call, turn)

    async def _answer(self, call: _Call, turn: Limit) -> None:
        """Set the result of a call, and count it."""
        assert call.checked is not None
        call.began = anyio.current_time()
        self._running[call] = None
        if call.events is not None:
            call.events.started(call.position, call.checked, call.began)
        try:
            call.result = await self._execute(call.checked, turn)
        except CallError as error:
            logger.debug("tool %r failed: %s", call.name, error, exc_info=error.__cause__)
            call.result = self._note_failure(call.name, error)
        finally:
            self.idle_since = now = anyio.current_time()
            if call in self._running:  # else it was abandoned
                del self._running[call]
                self.seconds += now - call.began
                self._count(call, now - call.began)

    async def _execute(self, call: ToolCall, turn: Limit) -> ToolResult:
        """The result that is there already, or of the first attempt without a transient error.

        The limit of a call begins with its slot, and holds for all attempts.

        Raises:
            CallError: The last attempt failed, or the limit was over.
            LimitExceeded: The turn's limit was over.
        """
        gate, session, limit = self._settings.gates[call.name], self._opened[call.name], None
        kwargs, policy = self._kwargs.get(call.name, {}), gate.policy
        found = gate.find_result(call.arguments, kwargs)
        if found is not None:
            return found
        seconds, source = self._settings.tool_s, "limits.tool_s"
        if policy.timeout_s is not None:
            seconds, source = policy.timeout_s, f"timeout_s of {call.name!r}"
        slot, tries = object(), 0
        while True:
            tries += 1
            try:
                if gate.has_queue:
                    await gate.acquire(slot)
                limit = limit or turn.open(seconds, source)
                result = await self._attempt(session, call, limit)
            except LimitExceeded:
                if limit is None or turn.is_over:
                    raise
                failure = CallError(describe_timeout(limit.deadline))
            except CallError as error:
                failure = error
            else:
                gate.note_success(call.arguments, kwargs, result)
                return result
            finally:
                gate.release(slot)
            assert limit is not None
            pause_s = policy.backoff_s * 2 ** (tries - 1)
            is_last = tries > policy.retries or not policy.is_transient(failure.root)
            if is_last or anyio.current_time() + pause_s >= limit.deadline.at:
                if tries == 1:
                    raise failure
                raise CallError(f"{failure} (after {tries} attempts)") from failure.__cause__
            await anyio.sleep(pause_s)

    def _attempt(
        self, session: ToolSession, call: ToolCall, limit: Limit
    ) -> Coroutine[Any, Any, ToolResult]:
        what = f"tool {call.name!r}"
        activity = f"{what} of trajectory {self._context.uid}/{self._context.member}"
        return attempt(_execute, session, call, limit=limit, what=what, activity=activity)

    def _count(self, call: _Call, seconds: float, *, is_refused: bool = False) -> None:
        """Count a call that has its result, or was cancelled, and emit its event: here only.

        Args:
            is_refused: Whether it did not run.
        """
        result, name, tally = call.result, call.name, self._settings.tally
        if isinstance(call.call, ToolCall) and name not in self._tools:
            name = UNKNOWN_TOOL
        is_error = result is None or result.is_error
        self.calls += 1
        self.errors += is_error
        tally.tool_calls += 1
        tally.tool_errors += is_error
        tally.tool(name).calls += 1
        counts = self._counts.get(name)
        if counts is None:
            counts = self._counts[name] = _Counts()
        counts.calls += 1
        counts.errors += is_error
        counts.seconds += seconds
        counts.seconds_max = max(counts.seconds_max, seconds)
        if result is not None and result.metrics:
            add_metrics(self.metrics, name, result.metrics)
        if call.events is not None:
            end = call.began + seconds
            call.events.ended(
                call.position, call.call, result, call.began, end, is_refused=is_refused
            )

    def _note_failure(self, name: str, error: CallError) -> ToolResult:
        """Count that a tool raised, or was too late; what the model reads then."""
        text, cause = str(error), error.__cause__
        self._settings.gates[name].note_failure(text)
        tool = self._settings.tally.tool(name)
        tool.failed += 1
        if not tool.first:
            tool.first = text
            if cause is not None:
                frames = ["Traceback (most recent call last):\n", *format_user_frames(cause)]
                tool.first = "".join([*frames, *traceback.format_exception_only(cause)])
        return error_result(text)

    def note_refused_media(self, name: str) -> None:
        """Count an answer as an error after all: the model is shown none of its media."""
        self.errors += 1
        self._settings.tally.tool_errors += 1
        if name in self._counts:
            self._counts[name].errors += 1

    def abandon(self) -> None:
        """Count calls that were given up and will not end, as cancelled ones."""
        running, self._running = self._running, {}
        for call in running:
            self._count(call, anyio.current_time() - call.began)

    def find_stateful(self, calls: Sequence[ToolCall | InvalidToolCall]) -> list[str]:
        """Names of the tools among those called whose answers depend on the calls before them."""
        names = dict.fromkeys(call.name for call in calls if isinstance(call, ToolCall))
        return [name for name in names if name in self._opened and self._tools[name].stateful]

    async def calc_rewards(self) -> list[float]:
        """Rewards of the tools that were used, in the order of their first use; sets `reward`.

        A tool without a reward has no entry, nor has one whose `calc_reward` fails or takes longer
        than ``limits.tool_s``: that is logged.

        Raises:
            ToolError: The one that failed decides the trajectory's reward.
        """
        judges = self._find_overriding("calc_reward")
        rewards: dict[str, float | None] = dict.fromkeys(judges)

        async def judge(name: str) -> None:
            rewards[name] = await self._calc_reward(name)

        await run_side_by_side([partial(judge, name) for name in judges])
        found = {name: reward for name, reward in rewards.items() if reward is not None}
        decided = [found[name] for name in found if self._opened[name].decides_reward]
        self.reward = sum(decided) if decided else None
        return list(found.values())

    async def _calc_reward(self, name: str) -> float | None:
        session, what = self._opened[name], f"calc_reward of tool {name!r}"
        limit = Clock(Deadline.after(self._settings.tool_s, "limits.tool_s"))
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
            limit = Clock(Deadline.after(self._settings.cleanup_s, "limits.cleanup_s"))
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


def describe_timeout(deadline: Deadline) -> str:
    """What a call that met its deadline is answered with."""
    return f"timed out after {deadline.seconds:g} s ({deadline.source})"
