"""One call of a tool: what it is, the foreign code that it runs, and how its policy runs that."""

from __future__ import annotations

import logging
import math
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import msgspec

from rollout.containment import Contained, call_foreign, containment_here
from rollout.errors import ToolError
from rollout.limits import Limit, call_limit
from rollout.observe.event_stream import EventStream
from rollout.observe.events import ToolEnded, ToolStarted
from rollout.scopes import find_exception
from rollout.tools.results import ToolResult, describe_error, error_result
from rollout.tools.schemas import SchemaCheck
from rollout.types import Cause, InvalidToolCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from rollout.observe.tally import Tally
    from rollout.tools.tool import Tool

    Execute = Callable[[], Awaitable[ToolResult]]

logger = logging.getLogger("rollout")
T = TypeVar("T")


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
        checked: With the arguments that the tool gets; None where it cannot run.
    """

    position: int
    call: ToolCall | InvalidToolCall
    tool: str
    began: float
    events: CallEvents | None
    checked: ToolCall | None = None
    result: ToolResult | None = None

    @property
    def is_error(self) -> bool:
        """Whether its answer is an error, or it has none: it was cancelled."""
        return self.result is None or self.result.is_error

    def emit_started(self) -> None:
        """Emit that the call begins."""
        if (to := self.events) is not None and to.events.tells_all:
            at = to.events.since_start(self.began)
            to.events.emit(ToolStarted(at=at, tool=self.tool, position=self.position, **to.where))

    def emit_ended(self, seconds: float, *, is_refused: bool) -> None:
        """Emit that the call has its result, or was cancelled."""
        if (to := self.events) is None:
            return
        # The text, and not the result, which may hold anything else.
        shown = None if self.result is None else self.result.text
        event = ToolEnded(
            at=to.events.since_start(self.began + seconds),
            began=to.events.since_start(self.began),
            tool=getattr(self.call, "name", ""),
            call_id=getattr(self.call, "id", "") or "",
            is_refused=is_refused,
            is_error=self.is_error,
            error=("cancelled" if shown is None else shown)[:200] if self.is_error else "",
            characters=len(shown or ""),
            position=self.position,
            **to.where,
        )
        to.events.tell_event(to.where["trajectory"], event, (self.call, shown))


async def attempt(
    action: Callable[[], Awaitable[T]],
    *,
    limit: Limit,
    what: str,
    code: Contained[T] | None = None,
    tally: Tally | None = None,
) -> T:
    """Await what `action` returns; it runs in a task of its own.

    It runs within `limit`, by `code` or another one; `what` names it, also where the loop blocks.
    With a `tally`, which counts it, code that does not end is a `ToolError` like any other.

    Raises:
        ToolError: It raised anything but KeyboardInterrupt, which is raised as itself; or `limit`
            was over, and it was cancelled. The text is for the model; its cause is what it raised.
        LimitExceeded: So was a limit around `limit`.
        UnresponsiveError: It was cancelled and did not end, and there is no `tally`.
    """
    async with containment_here() as containment:
        code = code or Contained(containment, what, what)
        code.what = what
        limit.govern(code.scope)
        token = call_limit.set(limit)
        try:
            await code.run(partial(call_foreign, action))
        finally:
            call_limit.reset(token)
            limit.release()
            if tally is None:
                code.mark_outer()
            elif code.unresponsive is not None and not code.has_stuck_outer:
                tally.unresponsive += 1
                logger.warning("%s", code.unresponsive)
    error, stopped = code.error, code.unresponsive
    if stopped is not None and tally is None:
        raise stopped
    if error is None and stopped is None and not code.was_cancelled:
        return cast("T", code.value)
    if error is not None and (interrupt := find_exception(error, KeyboardInterrupt)):
        raise interrupt
    if limit.is_over and (error is None or code.scope.cancel_called):
        if limit.is_outer_over:
            raise limit.deadline.error()
        late = f"timed out after {limit.deadline.seconds:g} s ({limit.deadline.source})"
        raise ToolError(late) from stopped
    if error is None:
        raise ToolError(str(stopped or f"{code.what} was cancelled: the runtime is closing"))
    raise ToolError(describe_error(error)) from find_exception(error) or error


class ToolGate:
    """Runs the calls of one tool as its policy says, for all trajectories of a runtime."""

    def __init__(self, tool: Tool, tool_s: float | None, tally: Tally) -> None:
        self.tool, self._policy, self._tally = tool, (policy := tool.policy), tally
        self.schema_check = SchemaCheck(tool.name, tool.schema["function"].get("parameters"))
        self._call_s, self._source = tool_s, "limits.tool_s"
        if policy.timeout_s is not None:
            self._call_s, self._source = policy.timeout_s, f"timeout_s of {tool.name!r}"
        self.has_queue = (policy.max_concurrency or policy.rate_limit_per_s) is not None
        self._slots = anyio.CapacityLimiter(policy.max_concurrency or math.inf)
        self._starting, self._next_start = anyio.Lock(), 0.0
        self._cache: dict[bytes, ToolResult] = {}  # the result used longest ago first
        self._failures, self._last_failure, self._refuses_until = 0, "", -math.inf

    async def answer(self, execute: Execute, key: object, turn: Limit, what: str) -> ToolResult:
        """Return the cached result of a call, or that of its last try, which may have failed.

        `execute` makes the call `what`, whose result is cached by `key`. The call's own limit lies
        within that of the turn, and begins with its slot, for all tries.
        """
        packed = b""
        if self._policy.cache_size:
            with suppress(Exception):  # the prompt's kwargs may hold any object: not cached then
                packed = msgspec.json.encode(key, order="deterministic")
        result = self._cache.pop(packed, None) or self.find_refusal()
        if result is None:
            try:
                result = await self._try(execute, turn, what)
            except ToolError as error:
                return self.note_failure(error)
            self._failures, self._refuses_until = 0, -math.inf
        if packed and not result.is_error:
            self._cache[packed] = result
            if len(self._cache) > self._policy.cache_size:
                del self._cache[next(iter(self._cache))]
        return result

    async def _try(self, execute: Execute, turn: Limit, what: str) -> ToolResult:
        """Make a call until it fails otherwise than in passing, or there is no time for a retry."""
        policy, limit, tries = self._policy, None, 0
        while True:
            tries += 1
            try:
                async with self._take_slot() if self.has_queue else nullcontext():
                    limit = limit or turn.open(self._call_s, self._source)
                    return await attempt(execute, limit=limit, what=what, tally=self._tally)
            except ToolError as error:
                cause, pause_s = error.__cause__, policy.backoff_s * 2 ** (tries - 1)
                has_time = limit and anyio.current_time() + pause_s < limit.deadline.at
                is_last = tries > policy.retries or not policy.is_transient(cause or error)
                if is_last or not has_time:
                    text = f"{error} (after {tries} attempts)" if tries > 1 else str(error)
                    raise ToolError(text) from cause
            await anyio.sleep(pause_s)

    @asynccontextmanager
    async def _take_slot(self) -> AsyncIterator[None]:
        """Hold one of `max_concurrency` slots, from when the rate allows another start."""
        async with self._slots:
            if self._policy.rate_limit_per_s is not None:
                async with self._starting:
                    await anyio.sleep_until(self._next_start)
                    self._next_start = anyio.current_time() + 1 / self._policy.rate_limit_per_s
            yield

    def find_refusal(self) -> ToolResult | None:
        """Return the breaker's answer where a call may not run now."""
        if not self._failures or anyio.current_time() >= self._refuses_until:
            return None
        last = f"its last {self._failures} calls failed (the last one: {self._last_failure})"
        return error_result(f"{self.tool.name!r} is not available: {last}; not called")

    def note_failure(self, error: ToolError) -> ToolResult:
        """Count a call that raised or timed out; return what the model reads then."""
        self._failures, self._last_failure = self._failures + 1, str(error)
        policy, now = self._policy, anyio.current_time()
        if self._failures >= (policy.breaker_failures or math.inf) and now >= self._refuses_until:
            self._refuses_until = now + policy.breaker_s
            logger.warning(
                "tool %r: %d calls in a row failed, the last with: %s; calls are refused for %g s",
                *(self.tool.name, self._failures, error, policy.breaker_s),
            )
        tally = self._tally.tool(self.tool.name)
        tally.failed += 1
        if not tally.first:
            cause = error.__cause__ and Cause.of(error.__cause__)
            where = cause and f"Traceback (most recent call last):\n{cause.traceback}"
            tally.first = f"{where}{cause.type}: {cause.message}" if cause else str(error)
        return error_result(str(error))
