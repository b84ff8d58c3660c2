"""The tools of one trajectory: calls in, one result for each of them out.

The way of a call: `TrajectoryTools.run` checks it, opens its tool at the first use and runs it
beside the other calls of its turn; `_run_call` has it wait for its session, counts it, and makes a
result of its failure; `ToolGate.run` waits for a slot and tries as often as the tool's policy says;
`attempt` runs the foreign code within the call's limit, and `normalise_result` makes the
`ToolResult` of what it returned.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import msgspec

from rollout.bridge import loop_clock
from rollout.containment import Contained, current_containment
from rollout.errors import LimitExceeded, ToolError
from rollout.limits import Clock, Deadline, cleanup_scope
from rollout.observe.event_stream import EventStream
from rollout.observe.events import ToolEnded, ToolStarted
from rollout.observe.tally import Tally
from rollout.scopes import unwrap_group
from rollout.tools.attempt import ToolGate, attempt, conclude, describe
from rollout.tools.function_tools import FunctionTool
from rollout.tools.results import ToolResult, TruncateSide, error_result, read_reward, truncate_text
from rollout.tools.schemas import quote_all
from rollout.tools.tool import ToolContext, ToolSession
from rollout.types import NOT_PARSED, UNKNOWN_TOOL, InvalidToolCall, ToolCall
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rollout.limits import Limit
    from rollout.tools.results import Answers
    from rollout.tools.tool import Tool

logger = logging.getLogger("rollout")
#: Characters of an error that an event says.
_SHOWN = 200


class CallEvents(msgspec.Struct, frozen=True):
    """Where the events of the calls of one turn go, and its trajectory, turn and path in them."""

    events: EventStream
    where: dict[str, Any]


class Call(msgspec.Struct, eq=False, gc=False):
    """One call of a turn.

    Attributes:
        call: As the model wrote it; it may not be parsed.
        tool: Its name, or what stands in its place in figures.
        began: When it did, or was refused.
        events: None where nobody reads.
        checked: With the arguments that the tool gets; None where it cannot run.
        result: None until it is answered.
    """

    position: int
    call: ToolCall | InvalidToolCall
    tool: str
    began: float
    events: CallEvents | None
    checked: ToolCall | None = None
    result: ToolResult | None = None

    def emit_started(self) -> None:
        """Emit that the call begins."""
        if (to := self.events) is not None and to.events.tells_all:
            at = to.events.since_start(self.began)
            event = ToolStarted(at=at, tool=self.tool, position=self.position, **to.where)
            to.events.emit(event)

    def emit_ended(self, now: float, *, is_refused: bool) -> None:
        """Emit that the call has its result, or was cancelled."""
        if (to := self.events) is None:
            return
        # The text, and not the result, which may hold anything else.
        text = None if self.result is None else self.result.text
        is_error = self.result is None or self.result.is_error
        event = ToolEnded(
            at=to.events.since_start(now),
            began=to.events.since_start(self.began),
            tool=getattr(self.call, "name", ""),
            call_id=getattr(self.call, "id", "") or "",
            is_refused=is_refused,
            is_error=is_error,
            error=("cancelled" if text is None else text[:_SHOWN]) if is_error else "",
            characters=len(text or ""),
            position=self.position,
            **to.where,
        )
        to.events.tell_event(to.where["trajectory"], event, (self.call, text))


class ToolSettings(msgspec.Struct, frozen=True):
    """What the tools of all trajectories share: arguments of `ToolExecutor`."""

    tally: Tally
    max_parallel_calls: int
    max_response_length: int
    truncate_side: TruncateSide
    tool_s: float | None
    cleanup_s: float


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
        gates: Mapping[str, ToolGate],
        context: ToolContext,
        kwargs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._settings, self._gates, self._context, self._kwargs = settings, gates, context, kwargs
        self._clock = loop_clock()
        self._opened: dict[str, ToolSession] = {}  # in the order in which they were opened
        self._closing = AsyncExitStack()  # of sessions that have something to close
        #: Of what one task at a time may use: these tools, to open one, and what is `serial`.
        self._locks = defaultdict[int, anyio.Lock](partial(anyio.Lock, fast_acquire=True))
        self._running: dict[Call, None] = {}
        self._counts: defaultdict[str, float] = defaultdict(float)
        self.metrics: defaultdict[str, float] = defaultdict(float)
        self.seconds, self.idle_since, self.is_closed = 0.0, 0.0, False
        self.calls = self.errors = self.invalid_in_a_row = 0
        self.reward: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools offered to this trajectory."""
        return tuple(self._gates)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools offered to this trajectory."""
        return [gate.tool.schema for gate in self._gates.values()]

    @property
    def counts(self) -> dict[str, float]:
        """Of each tool that was called, ``tool/TOOL/{calls,errors,seconds,seconds_max}``."""
        return dict(self._counts)

    @property
    def under_way(self) -> Sequence[tuple[str, float]]:
        """Calls that run, or wait for a slot: name, and since when."""
        return [(each.tool, each.began) for each in self._running]

    def has_open_sessions(self) -> bool:
        """Whether a tool is open that may hold something: plain functions hold nothing."""
        tools = [self._gates[name].tool for name in self._opened]
        return not all(isinstance(tool, FunctionTool) for tool in tools)

    def find_stateful(self, calls: Sequence[ToolCall | InvalidToolCall]) -> list[str]:
        """Names of the tools among those called whose answers depend on the calls before them."""
        names = dict.fromkeys(call.name for call in calls if isinstance(call, ToolCall))
        return [name for name in names if name in self._opened and self._gates[name].tool.stateful]

    # Calls.

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
        turn = self._check_calls(calls, offered, events)
        for name in dict.fromkeys(each.tool for each in turn if each.result is None):
            if name not in self._opened and (refusal := await self._open_used(name, limit)):
                for each in turn:
                    if each.result is None and each.tool == name:
                        self._refuse(each, refusal)
        running = [each for each in turn if each.result is None]
        if len(running) == 1:  # a task of its own would cost as much as the call
            await self._run_call(running[0], limit)
        else:
            await self._run_together(running, limit)
        return [self._bound_text(each.result) for each in turn if each.result is not None]

    def _bound_text(self, result: ToolResult) -> ToolResult:
        settings = self._settings
        text = truncate_text(result.text, settings.max_response_length, settings.truncate_side)
        return msgspec.structs.replace(result, text=encodable(text))

    def recall(
        self,
        calls: Sequence[ToolCall | InvalidToolCall],
        answers: Answers,
        offered: Collection[str] | None = None,
    ) -> list[ToolResult]:
        """As `run`, with the answers of before; no tool runs."""
        recalled = [each for each in self._check_calls(calls, offered) if each.result is None]
        self.seconds += answers.seconds
        for each in recalled:
            each.result = answers.results[each.position]
            self._count(each, answers.seconds / len(recalled))
        return list(answers.results)

    def _check_calls(
        self,
        calls: Sequence[ToolCall | InvalidToolCall],
        offered: Collection[str] | None,
        events: CallEvents | None = None,
    ) -> list[Call]:
        """Check the calls of a turn; those that cannot run are answered."""
        most, now, turn = self._settings.max_parallel_calls, self._clock(), list[Call]()
        for position, call in enumerate(calls):
            tool = call.name if isinstance(call, ToolCall) else NOT_PARSED
            if isinstance(call, ToolCall) and tool not in self._gates:
                tool = UNKNOWN_TOOL
            turn.append(each := Call(position, call, tool, now, events))
            if position >= most and isinstance(call, ToolCall):  # nor is it invalid
                limit = f"at most {most} calls per turn (agent.max_parallel_calls)"
                self._refuse(each, error_result(f"not executed: {limit}; call it again"))
                continue
            try:
                each.checked = self._check(call, offered)
                self.invalid_in_a_row = 0
            except ToolError as error:
                self.invalid_in_a_row += 1
                self._refuse(each, error_result(str(error)))
        return turn

    def _check(self, call: ToolCall | InvalidToolCall, offered: Collection[str] | None) -> ToolCall:
        """Return the call as its tool gets it; a `ToolError` says why it cannot run as it is."""
        if isinstance(call, InvalidToolCall):
            raise ToolError(f"invalid tool call: {call.reason}")
        names = [name for name in self._gates if offered is None or name in offered]
        if call.name not in names:
            raise ToolError(f"unknown tool {call.name!r}; known tools: {quote_all(names)}")
        try:
            kwargs = self._kwargs.get(call.name) or {}
            arguments = self._gates[call.name].check(call.arguments, kwargs)
        except ToolError:
            raise
        except Exception as error:  # the arguments' own types may raise anything
            text = f"invalid arguments for {call.name!r}: {describe(error)}"
            raise ToolError(text) from error
        return msgspec.structs.replace(call, arguments=arguments)

    def _refuse(self, call: Call, result: ToolResult) -> None:
        """Answer a call that does not run."""
        call.result, call.began = result, self._clock()
        self._count(call, 0.0, is_refused=True)

    async def _run_together(self, calls: Sequence[Call], turn: Limit) -> None:
        """Run calls at the same time, each begun before the next one.

        What one raises ends the others, and leaves as itself.
        """
        try:
            async with anyio.create_task_group() as tasks:
                for position, call in enumerate(calls):
                    if position:
                        await anyio.lowlevel.checkpoint()  # trio shuffles what is ready together
                    tasks.start_soon(self._run_call, call, turn)
        except BaseExceptionGroup as group:
            raise unwrap_group(group) from None

    async def _run_call(self, call: Call, turn: Limit) -> None:
        """Run a call, and set its result; those of sessions with one `serial` wait for each other.

        While a call waits the turn's limit counts, in which its own one lies.
        """
        checked, session, gate = call.checked, self._opened[call.tool], self._gates[call.tool]
        at_once = nullcontext()
        assert checked is not None and isinstance(call.call, ToolCall)  # noqa: PT018
        activity = f"tool {call.tool!r} of trajectory {self._context.uid}/{self._context.member}"
        execute = partial(session.execute, checked)
        arguments, serial = (call.call.arguments, self._kwargs.get(call.tool)), session.serial
        with at_once if serial is None and not gate.has_queue else turn.open(None, ""):
            async with at_once if serial is None else self._locks[id(serial)]:
                call.began = self._clock()
                self._running[call] = None
                call.emit_started()
                try:
                    call.result = await gate.run(execute, arguments, turn, activity)
                except ToolError as error:
                    call.result = gate.note_failure(error)
                finally:
                    self.idle_since = self._clock()
                    if call in self._running:  # else it was abandoned
                        del self._running[call]
                        self.seconds += self.idle_since - call.began
                        self._count(call, self.idle_since - call.began)

    # Figures.

    def _count(self, call: Call, seconds: float, *, is_refused: bool = False) -> None:
        """Count a call that has its result, or was cancelled, and emit its event: here only."""
        result, tally, counts, key = call.result, self._settings.tally, self._counts, call.tool
        is_error = result is None or result.is_error
        self.calls += 1
        self.errors += is_error
        tally.tool_calls += 1
        tally.tool_errors += is_error
        tally.tool(key).calls += 1
        counts[f"tool/{key}/calls"] += 1
        counts[f"tool/{key}/errors"] += is_error
        counts[f"tool/{key}/seconds"] += seconds
        counts[f"tool/{key}/seconds_max"] = max(counts[f"tool/{key}/seconds_max"], seconds)
        for name, value in () if result is None else result.metrics.items():
            number = float(value) if isinstance(value, bool) else read_reward(value)
            if number is not None:  # finite
                self.metrics[f"tools/{key}/{name}"] += number
        call.emit_ended(call.began + seconds, is_refused=is_refused)

    def note_refused_media(self, name: str) -> None:
        """Count an answer as an error after all: the model is shown none of its media."""
        self.errors += 1
        self._settings.tally.tool_errors += 1
        if (key := f"tool/{name}/errors") in self._counts:
            self._counts[key] += 1

    def abandon(self) -> None:
        """Count calls that were given up and will not end, as cancelled ones."""
        running, self._running = self._running, {}
        for call in running:
            self._count(call, self._clock() - call.began)

    # Sessions.

    async def open_first(self) -> list[str | Sequence[Mapping[str, Any]]]:
        """Open and begin the tools with `Tool.opens_first`; what they observe, in their order.

        What `ToolSession.begin` raises leaves as itself.

        Raises:
            ToolError: One could not be opened.
        """
        for name, gate in self._gates.items():
            if gate.tool.opens_first and name not in self._opened:
                await self._open(name, Clock(), None)  # `limits.trajectory_s` bounds it
        observations = [await each.begin() for each in list(self._opened.values())]
        return [each for each in observations if each is not None]

    async def _open_used(self, name: str, limit: Limit) -> ToolResult | None:
        """Open a tool that is used for the first time; what answers its calls where it fails."""
        if (refusal := self._gates[name].find_refusal()) is not None:
            return refusal
        try:
            await self._open(name, limit, self._settings.tool_s)
        except ToolError as error:
            return self._gates[name].note_failure(error)
        return None

    async def _open(self, name: str, outer: Limit, tool_s: float | None) -> None:
        """Open a tool within `tool_s`; a `ToolError` where it raises or takes longer."""
        tool, context = self._gates[name].tool, self._context
        if kwargs := self._kwargs.get(name):
            context = msgspec.structs.replace(context, kwargs=dict(kwargs))
        try:
            if isinstance(tool, FunctionTool):  # which has nothing to wait for
                self._opened[name] = tool.open_session(context)
                return
            with outer.open(None, ""):
                async with self._locks[id(self)]:
                    if name not in self._opened:  # another conversation may have opened it
                        await self._start(tool, context, outer.open(tool_s, "limits.tool_s"))
        except LimitExceeded:
            raise
        except Exception as error:
            cause = error.__cause__ if isinstance(error, ToolError) else error
            raise ToolError(f"could not open {name!r}: {error}") from cause

    async def _start(self, tool: Tool, context: ToolContext, limit: Limit) -> None:
        containment, what = current_containment(), f"open of tool {tool.name!r}"
        task = None if containment is None else Contained[None](containment, what)
        open_session = partial(self._open_session, tool, context, limit, task)
        if task is None:  # outside of a runtime
            await attempt(open_session, limit=limit, what=what)
        else:
            await conclude(task, task.run(open_session), limit)

    async def _open_session(
        self, tool: Tool, context: ToolContext, limit: Limit, task: Contained[None] | None
    ) -> None:
        """Open a session, and close it in the same task: it may have a group open.

        Where it has something to close its task pauses, until `_close_session` has it go on.
        """
        session = await tool.open(context)
        if not isinstance(session, ToolSession):
            raise ToolError(f"open returned {type(session).__name__}; expected a ToolSession")
        if task is not None and task.scope.cancel_called:  # it shielded itself: nobody waits for it
            with cleanup_scope(self._settings.cleanup_s):
                await session.close()
            await anyio.lowlevel.checkpoint()  # which ends here
        self._opened[tool.name] = session
        if type(session).close is not ToolSession.close:
            self._closing.push_async_callback(self._close_session, tool.name, session, task)
            if task is not None:
                limit.release()
                await task.pause()
                await session.close()

    async def calc_rewards(self) -> list[float]:
        """Rewards of the tools that were used, in the order of their first use; sets `reward`.

        A tool without a reward has no entry, nor has one whose `calc_reward` fails or takes longer
        than ``limits.tool_s``: that is logged.

        Raises:
            ToolError: The one that failed decides the trajectory's reward.
        """
        self.reward, rewards = None, list[float]()
        for name, session in list(self._opened.items()):
            if type(session).calc_reward is ToolSession.calc_reward:
                continue
            limit, what = self._settings.tool_s, f"calc_reward of tool {name!r}"
            clock = Clock(Deadline.after(limit, "limits.tool_s"))
            try:
                value: Any = await attempt(session.calc_reward, limit=clock, what=what)
            except ToolError as error:
                if session.decides_reward:
                    raise ToolError(f"tool {name!r}: calc_reward failed: {error}") from error
                logger.warning("tool %r: calc_reward failed: %s", name, error)
                continue
            if (reward := read_reward(value)) is not None:
                rewards.append(reward)
                if session.decides_reward:
                    self.reward = (self.reward or 0.0) + reward
            elif value is not None:
                text = "tool %r: calc_reward returned %.80r; expected a finite number"
                logger.warning(text, name, value)
        return rewards

    async def close(self) -> None:
        """Close every session once, the last opened first, each within ``limits.cleanup_s``.

        Shielded from cancellation; errors and overruns are logged. Ctrl-C (and on asyncio a bare
        `Task.cancel`) ends one session's close at once and is raised when all have had theirs.
        Where a close is given up with its task, another call closes the others.
        """
        self.is_closed = True
        self._opened.clear()
        with anyio.CancelScope(shield=True):
            await self._closing.aclose()

    async def _close_session(
        self, name: str, session: ToolSession, task: Contained[None] | None
    ) -> None:
        limit = Clock(Deadline.after(self._settings.cleanup_s, "limits.cleanup_s"))
        what = f"close of tool {name!r}"
        try:
            if task is None:
                await attempt(session.close, limit=limit, what=what)
            else:
                task.what = what
                await conclude(task, task.finish(), limit)
        except ToolError as error:
            logger.warning("tool %r: close failed: %s", name, error)
