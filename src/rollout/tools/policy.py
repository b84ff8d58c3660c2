"""How the calls of one tool are run: time limit, retries, concurrency, rate, cache and breaker."""

from __future__ import annotations

import logging
import math
import typing
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.config.checks import Count, Natural, Positive, validate
from rollout.errors import ToolError
from rollout.scopes import release_token
from rollout.tools.attempt import CallError, attempt
from rollout.tools.results import ToolResult, error_result, normalise_result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from rollout.limits import Limit
    from rollout.types import ToolCall

logger = logging.getLogger("rollout")
_NO_SLOT = nullcontext()


class TransientError(ToolError):
    """A failure that may be gone a moment later; raised by a tool, its call is tried again."""


class ToolPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How calls of a tool are run; its counts are shared by all trajectories of a runtime.

    Attributes:
        timeout_s: Seconds of one call with its retries; None takes ``limits.tool_s``. Waiting for
            `max_concurrency` and `rate_limit_per_s` does not count: the turn's deadline bounds it.
        max_concurrency: Calls that run at once; further ones wait.
        rate_limit_per_s: Calls that start in a second, evenly spaced; further ones wait.
        retries: How often a call that failed with a transient error is tried again.
        backoff_s: Pause before the first retry; it doubles with each further one.
        transient: Exception types that are transient beside `TransientError`.
        cache_size: Results kept, the most recently used, by arguments and prompt kwargs; errors
            are not. 0 keeps none.
        breaker_failures: Calls in a row that raised or timed out, after which calls are answered
            at once with an error, for `breaker_s`; the next failure after that time begins another
            such pause. None never refuses. Answers with `is_error` and refused arguments are no
            failures.
        breaker_s: See `breaker_failures`.

    Raises:
        ToolError: It lists every value that is out of bounds.
    """

    timeout_s: Positive | None = None
    max_concurrency: Count | None = None
    rate_limit_per_s: Positive | None = None
    retries: Natural = 0
    backoff_s: Positive = 0.5
    transient: tuple[type[Exception], ...] = ()
    cache_size: Natural = 0
    breaker_failures: Count | None = None
    breaker_s: Positive = 30.0

    def __post_init__(self) -> None:
        rules = typing.get_type_hints(type(self), include_extras=True)
        del rules["transient"]
        faults = [
            str(fault.below(name))
            for name, rule in rules.items()
            for fault in validate(rule, getattr(self, name))[1]
        ]
        if not all(isinstance(k, type) and issubclass(k, Exception) for k in self.transient):
            faults.append(f"transient = {self.transient!r}: expected a tuple of exception types")
        if faults:
            raise ToolError(f"ToolPolicy: {'; '.join(faults)}")

    def is_transient(self, error: BaseException) -> bool:
        """Whether a call that failed with `error` is worth another try."""
        return isinstance(error, (TransientError, *self.transient))


class ToolGate:
    """Runs the calls of one tool as its policy says, for all trajectories of a runtime.

    Attributes:
        has_queue: Whether calls may wait for a slot.
    """

    def __init__(self, name: str, policy: ToolPolicy, tool_s: float | None) -> None:
        self.name, self.policy = name, policy
        self.has_queue = policy.max_concurrency is not None or policy.rate_limit_per_s is not None
        self._call_s, self._source = tool_s, "limits.tool_s"
        if policy.timeout_s is not None:
            self._call_s, self._source = policy.timeout_s, f"timeout_s of {name!r}"
        self._slots = anyio.CapacityLimiter(policy.max_concurrency or math.inf)
        self._starting, self._next_start = anyio.Lock(), 0.0
        self._cache: dict[bytes, ToolResult] = {}  # the result used longest ago first
        self._failures, self._last_failure, self._refuses_until = 0, "", -math.inf

    async def run(
        self,
        execute: Callable[[ToolCall], Awaitable[Any]],
        call: ToolCall,
        kwargs: Mapping[str, Any],
        turn: Limit,
        activity: str,
    ) -> ToolResult:
        """Return the cached result of a call, or that of the first try without a transient failure.

        The limit of a call begins with its slot, and holds for all tries.

        Raises:
            CallError: The last try failed, or the limit was over.
            LimitExceeded: The turn's limit was over.
        """
        key = self._make_key(call, kwargs)
        known = self._cache.pop(key, None) or self.find_refusal()
        if known is not None:
            return self._store(key, known)
        policy, limit, tries = self.policy, None, 0
        while True:
            tries += 1
            try:
                async with self._take_slot() if self.has_queue else _NO_SLOT:
                    limit = limit or turn.open(self._call_s, self._source)
                    what = f"tool {self.name!r}"
                    result = await attempt(
                        _execute, execute, call, limit=limit, what=what, activity=activity
                    )
                self._failures = 0
                return self._store(key, result)
            except CallError as error:
                cause, pause_s = error.__cause__, policy.backoff_s * 2 ** (tries - 1)
                is_last = tries > policy.retries or not policy.is_transient(cause or error)
                assert limit is not None
                if is_last or anyio.current_time() + pause_s >= limit.deadline.at:
                    text = f"{error} (after {tries} attempts)" if tries > 1 else str(error)
                    raise CallError(text) from cause
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

    def _make_key(self, call: ToolCall, kwargs: Mapping[str, Any]) -> bytes:
        """Return the key of a call in the cache; an empty one where its result is not cached."""
        if not self.policy.cache_size:
            return b""
        try:
            return msgspec.json.encode(
                (call.arguments, kwargs),
                order="deterministic",
                # Models of pydantic: what they allow beyond their fields, and those left out of it.
                enc_hook=lambda model: (model.model_dump(), vars(model)),
            )
        except Exception:  # kwargs may hold any object
            return b""

    def _store(self, key: bytes, result: ToolResult) -> ToolResult:
        """Cache a result; the one used longest ago makes room."""
        if key and not result.is_error:
            self._cache[key] = result
            if len(self._cache) > self.policy.cache_size:
                del self._cache[next(iter(self._cache))]
        return result

    def find_refusal(self) -> ToolResult | None:
        """Return the breaker's answer where a call may not run now."""
        if not self._failures or anyio.current_time() >= self._refuses_until:
            return None
        return error_result(
            f"{self.name!r} is not available: its last {self._failures} calls failed (the last "
            f"one: {self._last_failure}); not called"
        )

    def note_failure(self, failure: str) -> None:
        """Count a call that raised or timed out, and refuse further ones after too many."""
        self._failures, self._last_failure = self._failures + 1, failure
        limit, now = self.policy.breaker_failures, anyio.current_time()
        if limit is not None and self._failures >= limit and now >= self._refuses_until:
            self._refuses_until = now + self.policy.breaker_s
            logger.warning(
                "tool %r: %d calls in a row failed, the last with: %s; calls are refused for %g s",
                *(self.name, self._failures, failure, self.policy.breaker_s),
            )


async def _execute(execute: Callable[[ToolCall], Awaitable[Any]], call: ToolCall) -> ToolResult:
    return normalise_result(await execute(call))
