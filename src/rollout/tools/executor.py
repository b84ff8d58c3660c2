"""The tools of a runtime, and those of each of its trajectories: calls in, results out.

The way of a call: `TrajectoryTools.run` checks it, opens its tool at the first use and runs it
beside others; `_run_call` has it wait for its session, and counts it; `ToolGate.answer` waits for a
slot, tries as the policy says and makes a result of a failure; `attempt` runs the foreign code.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
from msgspec.structs import replace

from rollout.bridge import loop_clock
from rollout.child_processes import ChildProcesses
from rollout.containment import Contained, current_containment
from rollout.errors import LimitExceeded, ToolError
from rollout.limits import Clock, Deadline, Limit, cleanup_scope
from rollout.observe.tally import Tally
from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
from rollout.scopes import unwrap_group
from rollout.tools.calls import Call, CallEvents, ToolGate, attempt
from rollout.tools.function_tools import FunctionTool
from rollout.tools.langchain import is_langchain_tool, wrap_langchain_tool
from rollout.tools.results import ToolResult, normalise_result, read_reward, truncate_text
from rollout.tools.schemas import as_openai_schema, quote_all
from rollout.tools.tool import Tool, ToolContext, ToolPolicy, ToolSession
from rollout.types import NOT_PARSED, UNKNOWN_TOOL, InvalidToolCall, Prompt, ToolCall
from rollout.user_code import NotImportableError
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rollout.tools.results import Answers, TruncateSide
    from rollout.worker_threads import WorkerThreads

logger = logging.getLogger("rollout")


class ToolExecutor:
    """Holds the tools of a runtime; owns no task. Close its sessions, then the executor.

    Args:
        tools: `Tool` objects; plain functions are wrapped by `function_tool`, tools of LangChain
            by `langchain_tools`.
        threads: Where sync functions run; stays the caller's.
        max_parallel_calls: Calls of one turn that run; the others are answered unexecuted.
        max_response_length: Longest text of a result, in characters, before the marker.
        truncate_side: Where longer texts lose their characters; see `truncate_text`.
        tool_s: Seconds for one call, and for opening one tool; None for no limit.
        cleanup_s: Seconds for closing one session.
        max_processes: Calls with ``isolation="process"`` that run at once.
        tally: Counts the calls; None where nobody reads that.

    Attributes:
        names: Of all tools, in the order given.
        opens_first: Whether trajectories open tools before their agent begins.

    Raises:
        ToolError: A function cannot be a tool, a schema is none, or names collide.
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]],
        *,
        threads: WorkerThreads,
        max_parallel_calls: int,
        max_response_length: int,
        truncate_side: TruncateSide,
        tool_s: float | None,
        cleanup_s: float,
        max_processes: int = 8,
        tally: Tally | None = None,
    ) -> None:
        found, self._tally = [_make_tool(tool) for tool in tools], tally or Tally()
        _refuse_equal_names(found)
        self._gates = {each.name: ToolGate(each, tool_s, self._tally) for each in found}
        self.names, self._tool_s, self._cleanup_s = tuple(self._gates), tool_s, cleanup_s
        self._max_calls, self._max_length = max_parallel_calls, max_response_length
        self._side, self._warned = truncate_side, set[str]()
        self._processes = ChildProcesses(
            "rollout.tools.function_tools", max_processes=max_processes, cleanup_s=cleanup_s
        )
        self._make_context = partial(ToolContext, threads=threads, processes=self._processes)
        self.opens_first = any(tool.opens_first for tool in found)

    def names_for(self, prompt: Prompt) -> Sequence[str] | None:
        """Names of the tools that a prompt is offered; a `ToolError` where it asks wrongly."""
        if prompt.tools is not None:
            return prompt.tools
        return [name for name, gate in self._gates.items() if gate.tool.is_offered(prompt)]

    async def prepare(self) -> None:
        """Let each tool make sure that it can answer here; a `ToolError` says why one cannot."""
        tools = [gate.tool for gate in self._gates.values()]
        for tool in tools:
            await tool.prepare()
        # Only now: when a function was decorated its name led to nothing yet.
        refs = [ref for tool in tools if (ref := getattr(tool, "function_ref", None)) is not None]
        try:
            if refs:
                await self._processes.prepare(refs, self._tool_s, "limits.tool_s")
        except NotImportableError as error:
            raise ToolError(f"isolation = 'process': {error}") from error

    def schemas(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Schemas of the tools offered, in the order of `names`; None takes all."""
        return [gate.tool.schema for gate in self._select(names).values()]

    def open_session(
        self,
        *,
        uid: str,
        member: int,
        names: Sequence[str] | None = None,
        tools_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        extra: dict[str, Any] | None = None,
        prompt: Prompt | None = None,
        sandbox: TrajectorySandbox | None = None,
    ) -> TrajectoryTools:
        """The tools of one trajectory; each is opened at its first call. The caller closes them.

        `tools_kwargs` of tools that the trajectory is not offered are ignored; a warning says so,
        once for each name. Those that are no mapping, and unknown names, are a `ToolError`.
        """
        gates, kwargs = self._select(names), tools_kwargs or {}
        for name, value in kwargs.items():
            if name in gates and not isinstance(value, Mapping):
                raise ToolError(f"tools_kwargs[{name!r}] = {value!r:.80}; expected a mapping")
            if name not in gates and name not in self._warned:
                self._warned.add(name)
                known = f"is no tool here; known: {quote_all(self._gates)}"
                why = "is not offered to their prompt" if name in self._gates else known
                logger.warning("tools_kwargs[%r] are ignored: it %s", name, why)
        sandbox, extra = sandbox or TrajectorySandbox(), {} if extra is None else extra
        context = self._make_context(
            uid=uid, member=member, prompt=prompt, extra=extra, sandbox=sandbox
        )
        return TrajectoryTools(self, gates, context, kwargs)

    async def close(self) -> None:
        """End the processes of isolated tools; shielded, bounded."""
        await self._processes.close()

    def _select(self, names: Sequence[str] | None) -> dict[str, ToolGate]:
        names = self.names if names is None else names
        if unknown := [name for name in names if name not in self._gates]:
            raise ToolError(f"unknown tools: {quote_all(unknown)}; known: {quote_all(self._gates)}")
        return {name: self._gates[name] for name in names}


def _make_tool(tool: Tool | Callable[..., Any]) -> Tool:
    """`tool` itself after a look at its name and schema, or a function as a tool."""
    if is_langchain_tool(tool):
        return wrap_langchain_tool(tool)
    if not isinstance(tool, Tool):
        return FunctionTool(tool)
    kind, name = type(tool).__name__, getattr(tool, "name", None)
    schema = as_openai_schema(getattr(tool, "schema", None), f"{kind}.schema")
    if "function" not in tool.schema or schema["function"]["name"] != name:
        raise ToolError(f"{kind}.name = {name!r}: its schema is of {schema!r:.200}")
    if not isinstance(tool.policy, ToolPolicy):
        raise ToolError(f"{kind}.policy = {tool.policy!r:.80}; expected a ToolPolicy")
    return tool


async def _ask_reward(session: ToolSession) -> float | None:
    value: Any = await session.calc_reward()
    if (reward := read_reward(value)) is None and value is not None:
        raise ToolError(f"it returned {value!r:.80}; expected a finite number")
    return reward


def _refuse_equal_names(tools: Sequence[Tool]) -> None:
    homes = defaultdict[str, list[str]](list)
    for tool in tools:
        home: Any = tool if isinstance(tool, FunctionTool) else type(tool)
        homes[tool.name].append(getattr(tool, "origin", f"{home.__module__}.{home.__qualname__}"))
    if equal := [f"{name!r} ({', '.join(at)})" for name, at in homes.items() if len(at) > 1]:
        advice = 'give all but one of each another name, as in @function_tool("another_name")'
        raise ToolError(f"tools with the same name: {', '.join(equal)}; {advice}")


class TrajectoryTools:
    """The tools of one trajectory, used and closed in the trajectory's own task.

    Attributes:
        names, schemas: Of the tools offered to this trajectory.
        running: Calls that run, or wait for a slot, in the order in which they began.
        seconds: Time in calls, on the loop's clock; calls at the same time add up.
        calls: Calls of the model's that have ended, also those that no tool could answer.
        errors: Those of them whose answer is an error, whatever its cause, or that were cancelled.
        invalid_in_a_row: Latest calls in a row that could not be run as asked.
        idle_since: When the last call ended.
        reward: The sum of what tools gave that decide the trajectory's reward; None where none did.
        is_closed: Whether they were closed.
        counts: Of each tool that was called, ``tool/TOOL/{calls,errors,seconds,seconds_max}``.
        metrics: Sums of the numbers that tools measured, as ``tools/TOOL/NAME``.
    """

    def __init__(
        self,
        executor: ToolExecutor,
        gates: Mapping[str, ToolGate],
        context: ToolContext,
        kwargs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._executor, self._gates, self._context, self._kwargs = executor, gates, context, kwargs
        self.names, self.schemas = tuple(gates), [gate.tool.schema for gate in gates.values()]
        self._clock = loop_clock()
        self._opened: dict[str, ToolSession] = {}  # in the order in which they were opened
        self._closing = AsyncExitStack()  # of sessions that have something to close
        #: Of what one task at a time may use: these tools, to open one, and what is `serial`.
        self._locks = defaultdict[int, anyio.Lock](partial(anyio.Lock, fast_acquire=True))
        self.running: dict[Call, None] = {}
        self.counts, self.metrics = defaultdict[str, float](float), defaultdict[str, float](float)
        self.seconds, self.idle_since, self.is_closed = 0.0, 0.0, False
        self.calls = self.errors = self.invalid_in_a_row = 0
        self.reward: float | None = None

    def has_open_sessions(self) -> bool:
        """Whether a tool is open that may hold something: plain functions hold nothing."""
        return any(not isinstance(self._gates[name].tool, FunctionTool) for name in self._opened)

    def find_stateful(self, calls: Sequence[ToolCall | InvalidToolCall]) -> list[str]:
        """Names of the tools among those called whose answers depend on the calls before them."""
        names = dict.fromkeys(call.name for call in calls if isinstance(call, ToolCall))
        return [name for name in names if name in self._opened and self._gates[name].tool.stateful]

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
        truncated. Cancellation ends the calls and leaves the sessions open, for `close`. Tools that
        are not `offered` are unknown; `events` hears of the calls.

        Raises:
            LimitExceeded: `limit`, the turn's, was over; every call was cancelled and has ended.
            ToolError: The trajectory's tools are closed.
        """
        if self.is_closed:
            raise ToolError("the tools of this trajectory are closed")
        turn = self._check_calls(calls, offered, events)
        await self._open_used(turn, limit)
        await self._run_together([each for each in turn if each.result is None], limit)
        bound, side = self._executor._max_length, self._executor._side
        results = [each.result or ToolResult() for each in turn]  # each has one
        return [replace(r, text=encodable(truncate_text(r.text, bound, side))) for r in results]

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
        most, turn = self._executor._max_calls, list[Call]()
        names = [name for name in self._gates if offered is None or name in offered]
        for position, call in enumerate(calls):
            tool = NOT_PARSED
            if isinstance(call, ToolCall):
                tool = call.name if call.name in self._gates else UNKNOWN_TOOL
            turn.append(each := Call(position, call, tool, self._clock(), events))
            is_past = position >= most and isinstance(call, ToolCall)
            try:
                if is_past:
                    limit = f"at most {most} calls per turn (agent.max_parallel_calls)"
                    raise ToolError(f"not executed: {limit}; call it again")
                each.checked = self._check_call(call, names)
                self.invalid_in_a_row = 0
            except ToolError as error:
                self.invalid_in_a_row += not is_past
                self._refuse(each, ToolResult(str(error), is_error=True))
        return turn

    def _check_call(self, call: ToolCall | InvalidToolCall, names: Sequence[str]) -> ToolCall:
        """The call with the arguments that its tool gets; a `ToolError` where it cannot run."""
        if isinstance(call, InvalidToolCall):
            raise ToolError(f"invalid tool call: {call.reason}")
        if call.name not in names:
            raise ToolError(f"unknown tool {call.name!r}; known tools: {quote_all(names)}")
        gate = self._gates[call.name]
        if isinstance(gate.tool, FunctionTool):  # which the prompt may give some, too
            arguments = gate.tool.check(call.arguments, self._kwargs.get(call.name) or {})
        else:
            arguments = gate.schema_check.check(call.arguments)
        return replace(call, arguments=arguments)

    def _refuse(self, call: Call, result: ToolResult) -> None:
        """Answer a call that does not run."""
        call.result, call.began = result, self._clock()
        self._count(call, 0.0, is_refused=True)

    async def _run_together(self, calls: Sequence[Call], turn: Limit) -> None:
        """Run calls at the same time, each begun before the next; what one raises ends all."""
        if len(calls) == 1:  # a task of its own would cost as much as the call
            return await self._run_call(calls[0], turn)
        try:
            async with anyio.create_task_group() as tasks:
                for call in calls:
                    tasks.start_soon(self._run_call, call, turn)
                    await anyio.lowlevel.checkpoint()  # trio shuffles what is ready together
        except BaseExceptionGroup as group:
            raise unwrap_group(group) from None

    async def _run_call(self, call: Call, turn: Limit) -> None:
        """Run a call, and set its result; while it waits for its session the turn's time runs."""
        session, gate, checked = self._opened[call.tool], self._gates[call.tool], call.checked
        assert checked is not None

        async def execute() -> ToolResult:
            return normalise_result(await session.execute(checked))

        key = getattr(call.call, "arguments", None), self._kwargs.get(call.tool)
        what = f"tool {call.tool!r} of trajectory {self._context.uid}/{self._context.member}"
        serial = session.serial
        with turn.open(None, "") if serial is not None or gate.has_queue else nullcontext():
            async with nullcontext() if serial is None else self._locks[id(serial)]:
                call.began = self._clock()
                self.running[call] = None
                call.emit_started()
                try:
                    call.result = await gate.answer(execute, key, turn, what)
                finally:
                    self.end_call(call)

    def end_call(self, call: Call) -> None:
        """Count a call that ran; also one that was given up and will not end, as cancelled."""
        if call in self.running:
            del self.running[call]
            self.idle_since = self._clock()
            self.seconds += (seconds := self.idle_since - call.began)
            self._count(call, seconds)

    def _count(self, call: Call, seconds: float, *, is_refused: bool = False) -> None:
        """Count a call that has its result, or was cancelled, and emit its event: here only."""
        tally, counts, key = self._executor._tally, self.counts, f"tool/{call.tool}"
        self.calls += 1
        self.errors += call.is_error
        tally.tool_calls += 1
        tally.tool_errors += call.is_error
        tally.tool(call.tool).calls += 1
        counts[f"{key}/calls"] += 1
        counts[f"{key}/errors"] += call.is_error
        counts[f"{key}/seconds"] += seconds
        counts[f"{key}/seconds_max"] = max(counts[f"{key}/seconds_max"], seconds)
        for name, value in () if call.result is None else call.result.metrics.items():
            number = float(value) if isinstance(value, bool) else read_reward(value)
            if number is not None:  # finite
                self.metrics[f"tools/{call.tool}/{name}"] += number
        call.emit_ended(seconds, is_refused=is_refused)

    def note_refused_media(self, name: str) -> None:
        """Count an answer as an error after all: the model is shown none of its media."""
        self.errors += 1
        self._executor._tally.tool_errors += 1
        self.counts[f"tool/{name}/errors"] += 1

    async def open_first(self) -> list[str | Sequence[Mapping[str, Any]]]:
        """Open and begin the tools with `Tool.opens_first`; what they observe, in their order."""
        for name, gate in self._gates.items():
            if gate.tool.opens_first:
                await self._open(name, Clock(), None)  # `limits.trajectory_s` bounds it
        observations = [await each.begin() for each in list(self._opened.values())]
        return [each for each in observations if each is not None]

    async def _open_used(self, turn: Sequence[Call], limit: Limit) -> None:
        """Open the tools that the calls use for the first time; where that fails, answer these."""
        used = dict.fromkeys(each.tool for each in turn if each.result is None)
        for name in [each for each in used if each not in self._opened]:
            gate = self._gates[name]
            if (refusal := gate.find_refusal()) is None:
                try:
                    await self._open(name, limit, self._executor._tool_s)
                    continue
                except ToolError as error:
                    refusal = gate.note_failure(error)
            for each in turn:
                if each.result is None and each.tool == name:
                    self._refuse(each, refusal)

    async def _open(self, name: str, outer: Limit, tool_s: float | None) -> None:
        """Open a tool within `tool_s`; a `ToolError` where it raises or takes longer."""
        tool, what = self._gates[name].tool, f"open of tool {name!r}"
        context = replace(self._context, kwargs=dict(self._kwargs.get(name) or {}))
        try:
            if isinstance(tool, FunctionTool):  # which has nothing to wait for
                self._opened[name] = await tool.open(context)
                return
            with outer.open(None, ""):
                async with self._locks[id(self)]:
                    if name in self._opened:  # another conversation has opened it
                        return
                    limit, containment = outer.open(tool_s, "limits.tool_s"), current_containment()
                    code = None if containment is None else Contained[None](containment, what, what)
                    open_session = partial(self._open_session, tool, context, limit, code)
                    tally = self._executor._tally
                    await attempt(open_session, limit=limit, what=what, code=code, tally=tally)
        except LimitExceeded:
            raise
        except Exception as error:
            cause = error.__cause__ if isinstance(error, ToolError) else error
            raise ToolError(f"could not open {name!r}: {error}") from cause

    async def _open_session(
        self, tool: Tool, context: ToolContext, limit: Limit, code: Contained[None] | None
    ) -> None:
        """Open a session; its task pauses until it closes it too: it may have a group open."""
        session = await tool.open(context)
        if not isinstance(session, ToolSession):
            raise ToolError(f"open returned {type(session).__name__}; expected a ToolSession")
        if code is not None and code.scope.cancel_called:  # it shielded itself: nobody waits for it
            with cleanup_scope(self._executor._cleanup_s):
                await session.close()
            await anyio.lowlevel.checkpoint()  # which ends here
        self._opened[tool.name] = session
        if type(session).close is not ToolSession.close:
            self._closing.push_async_callback(self._close_session, tool.name, session, code)
            if code is not None:
                limit.release()
                await code.pause()
                await session.close()

    async def calc_rewards(self) -> list[float]:
        """Rewards of the tools that were used, in the order of their first use; sets `reward`.

        A tool without a reward has no entry, nor has one whose `calc_reward` fails or takes longer
        than ``limits.tool_s``: that is logged, or a `ToolError` where it decides the trajectory's.
        """
        self.reward, rewards = None, list[float]()
        for name, session in list(self._opened.items()):
            if type(session).calc_reward is ToolSession.calc_reward:
                continue
            limit = Clock(Deadline.after(self._executor._tool_s, "limits.tool_s"))
            what, ask = f"calc_reward of tool {name!r}", partial(_ask_reward, session)
            try:
                reward = await attempt(ask, limit=limit, what=what)
            except ToolError as error:
                if session.decides_reward:
                    raise ToolError(f"tool {name!r}: calc_reward failed: {error}") from error
                logger.warning("tool %r: calc_reward failed: %s", name, error)
                continue
            if reward is not None:
                rewards.append(reward)
                if session.decides_reward:
                    self.reward = (self.reward or 0.0) + reward
        return rewards

    async def close(self) -> None:
        """Close every session once, the last opened first, each within ``limits.cleanup_s``.

        Shielded from cancellation; errors and overruns are logged. Ctrl-C ends one session's close
        and is raised when all have had theirs. Where a close is given up, call again for the rest.
        """
        self.is_closed = True
        self._opened.clear()
        with anyio.CancelScope(shield=True):
            await self._closing.aclose()

    async def _close_session(
        self, name: str, session: ToolSession, code: Contained[None] | None
    ) -> None:
        limit = Clock(Deadline.after(self._executor._cleanup_s, "limits.cleanup_s"))
        try:
            await attempt(session.close, limit=limit, what=f"close of tool {name!r}", code=code)
        except ToolError as error:
            logger.warning("tool %r: close failed: %s", name, error)
