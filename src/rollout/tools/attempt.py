"""Running foreign code: what it raises is a `ToolError`, and cancellation passes."""

from __future__ import annotations

import itertools
import logging
import math
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import msgspec

from rollout.containment import Contained, containment_here
from rollout.errors import ToolError
from rollout.limits import call_limit
from rollout.scopes import find_exception, release_token
from rollout.tools.results import ToolResult, error_result, normalise_result
from rollout.types import Cause, read_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from rollout.limits import Limit
    from rollout.observe.tally import Tally
    from rollout.tools.tool import Tool

logger = logging.getLogger("rollout")
T = TypeVar("T")
#: In place of a slot where nothing waits for one.
_NO_SLOT = nullcontext()
#: Characters of an exception's message that the model sees.
MAX_MESSAGE = 500


async def attempt(
    action: Callable[[], Awaitable[T]],
    *,
    limit: Limit,
    what: str,
    activity: str | None = None,
) -> T:
    """Await what `action` returns; it runs in a task of its own.

    Args:
        action: Runs within `limit`.
        what: What it is, for messages.
        activity: Whose work it is, where it blocks the event loop.

    Raises:
        ToolError: It raised anything but KeyboardInterrupt, which is raised as itself; or `limit`
            was over, and it was cancelled. The text is for the model; its cause is what it raised.
        LimitExceeded: So was a limit around `limit`.
        UnresponsiveError: It was cancelled, and did not end.
    """
    async with containment_here() as containment:
        code: Contained[T] = Contained(containment, what, activity)
        return await conclude(code, code.run(action), limit)


async def conclude(code: Contained[T], running: Awaitable[object], limit: Limit) -> T:
    """Return what contained code returns, for whose report `running` waits; as `attempt`."""
    limit.govern(code.scope)
    token = call_limit.set(limit)
    try:
        await running
    finally:
        call_limit.reset(token)
        limit.release()
    error = code.error
    if error is None and not code.was_cancelled:
        return cast("T", code.value)
    if error is not None and (interrupt := find_exception(error, KeyboardInterrupt)):
        raise interrupt
    if limit.is_over and (error is None or code.scope.cancel_called):
        if limit.is_outer_over:
            raise limit.deadline.error()
        raise ToolError(f"timed out after {limit.deadline.seconds:g} s ({limit.deadline.source})")
    if error is None:
        raise ToolError(f"{code.what} was cancelled: the runtime is closing")
    raise ToolError(describe(error)) from find_exception(error) or error


def describe(error: BaseException) -> str:
    """One short text for the model: type and message; a `ToolError` speaks for itself."""
    leaf = find_exception(error) or error
    message = read_message(leaf)
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "…"
    name = "" if isinstance(leaf, ToolError) and message else type(leaf).__name__
    return ": ".join(filter(None, (name, message)))


class ToolGate:
    """Runs the calls of one tool as its policy says, for all trajectories of a runtime.

    Attributes:
        tool: The tool.
        check: Makes the arguments that it gets, of the model's and the prompt's kwargs.
        has_queue: Whether calls may wait for a slot.
    """

    def __init__(
        self,
        tool: Tool,
        check: Callable[[Any, Mapping[str, Any]], dict[str, Any]],
        tool_s: float | None,
        tally: Tally,
    ) -> None:
        self.tool, self.check, self._tally = tool, check, tally
        self.name, self.policy = tool.name, (policy := tool.policy)
        self.has_queue = policy.max_concurrency is not None or policy.rate_limit_per_s is not None
        self._call_s, self._source = tool_s, "limits.tool_s"
        if policy.timeout_s is not None:
            self._call_s, self._source = policy.timeout_s, f"timeout_s of {self.name!r}"
        self._slots = anyio.CapacityLimiter(policy.max_concurrency or math.inf)
        self._starting, self._next_start = anyio.Lock(), 0.0
        self._cache: dict[bytes, ToolResult] = {}  # the result used longest ago first
        self._failures, self._last_failure, self._refuses_until = 0, "", -math.inf

    async def run(
        self,
        execute: Callable[[], Awaitable[Any]],
        arguments: object,
        turn: Limit,
        activity: str,
    ) -> ToolResult:
        """Return the cached result of a call, or that of the first try without a transient failure.

        Args:
            execute: Makes the call.
            arguments: What its result is cached by.
            turn: The limit around that of the call, which begins with its slot, for all tries.
            activity: Whose work it is, where it blocks the event loop.

        Raises:
            ToolError: The last try failed, or the limit was over.
            LimitExceeded: The turn's limit was over.
        """

        async def run_once() -> ToolResult:
            return normalise_result(await execute())

        key = self._make_key(arguments) if self.policy.cache_size else b""
        result = self._cache.pop(key, None) or self.find_refusal()
        limit, tries = None, itertools.count(1)
        while result is None:
            try:
                async with self._take_slot() if self.has_queue else _NO_SLOT:
                    limit = limit or turn.open(self._call_s, self._source)
                    what = f"tool {self.name!r}"
                    result = await attempt(run_once, limit=limit, what=what, activity=activity)
                self._failures, self._refuses_until = 0, -math.inf
            except ToolError as error:
                assert limit is not None
                await self._wait_for_retry(error, next(tries), limit)
        if key and not result.is_error:
            self._cache[key] = result
            if len(self._cache) > self.policy.cache_size:
                del self._cache[next(iter(self._cache))]
        return result

    async def _wait_for_retry(self, error: ToolError, tries: int, limit: Limit) -> None:
        """Return where a failed call is to be tried again; else raise its failure."""
        policy, cause = self.policy, error.__cause__
        pause_s = policy.backoff_s * 2 ** (tries - 1)
        is_last = tries > policy.retries or not policy.is_transient(cause or error)
        if is_last or anyio.current_time() + pause_s >= limit.deadline.at:
            raise ToolError(f"{error} (after {tries} attempts)" if tries > 1 else error) from cause
        await anyio.sleep(pause_s)

    @asynccontextmanager
    async def _take_slot(self) -> AsyncIterator[None]:
        """Hold one of `max_concurrency` slots, from when the rate allows another start."""
        borrower = object()
        try:
            await self._slots.acquire_on_behalf_of(borrower)
            if self.policy.rate_limit_per_s is not None:
                async with self._starting:
                    await anyio.sleep_until(self._next_start)
                    self._next_start = anyio.current_time() + 1 / self.policy.rate_limit_per_s
            yield
        finally:
            release_token(self._slots, borrower)

    def _make_key(self, arguments: object) -> bytes:
        """Return the key of a call in the cache; an empty one where its result is not cached."""
        try:
            return msgspec.json.encode(arguments, order="deterministic")
        except Exception:  # the prompt's kwargs may hold any object
            return b""

    def find_refusal(self) -> ToolResult | None:
        """Return the breaker's answer where a call may not run now."""
        if not self._failures or anyio.current_time() >= self._refuses_until:
            return None
        return error_result(
            f"{self.name!r} is not available: its last {self._failures} calls failed (the last "
            f"one: {self._last_failure}); not called"
        )

    def note_failure(self, error: ToolError) -> ToolResult:
        """Count a call that raised or timed out; return what the model reads then.

        After too many in a row further calls are refused.
        """
        self._failures, self._last_failure = self._failures + 1, str(error)
        policy, now = self.policy, anyio.current_time()
        if self._failures >= (policy.breaker_failures or math.inf) and now >= self._refuses_until:
            self._refuses_until = now + policy.breaker_s
            logger.warning(
                "tool %r: %d calls in a row failed, the last with: %s; calls are refused for %g s",
                *(self.name, self._failures, error, policy.breaker_s),
            )
        tally = self._tally.tool(self.name)
        tally.failed += 1
        if not tally.first:
            cause = error.__cause__ and Cause.of(error.__cause__)
            where = cause and f"Traceback (most recent call last):\n{cause.traceback}"
            tally.first = f"{where}{cause.type}: {cause.message}" if cause else str(error)
        return error_result(str(error))
