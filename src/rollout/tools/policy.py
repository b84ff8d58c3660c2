"""How the calls of one tool are run: time limit, retries, concurrency, rate, cache and breaker."""

from __future__ import annotations

import logging
import math
import typing
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.config.checks import Count, Natural, Positive, validate
from rollout.errors import ToolError
from rollout.scopes import release_token
from rollout.tools.results import error_result

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.tools.results import ToolResult

logger = logging.getLogger("rollout")


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
    """What all trajectories of a runtime share of one tool: its slots, rate, cache and breaker."""

    def __init__(self, name: str, policy: ToolPolicy) -> None:
        self.name, self.policy = name, policy
        #: Whether calls may wait for a slot.
        self.has_queue = policy.max_concurrency is not None or policy.rate_limit_per_s is not None
        self._slots = anyio.CapacityLimiter(policy.max_concurrency or math.inf)
        self._starting = anyio.Lock()
        self._next_start = 0.0
        self._results: OrderedDict[bytes, ToolResult] = OrderedDict()
        self._failures, self._last_failure, self._refuses_until = 0, "", -math.inf

    async def acquire(self, slot: object) -> None:
        """Take one of `max_concurrency` slots, once the rate allows another start.

        Cancellation may leave the slot taken: `release` it whatever happens.
        """
        await self._slots.acquire_on_behalf_of(slot)
        if self.policy.rate_limit_per_s is not None:
            async with self._starting:
                await anyio.sleep_until(self._next_start)
                now = max(self._next_start, anyio.current_time())
                self._next_start = now + 1 / self.policy.rate_limit_per_s

    def release(self, slot: object) -> None:
        """Give the slot back, where one was taken."""
        if self.has_queue:
            release_token(self._slots, slot)

    def find_result(self, arguments: Any, kwargs: Mapping[str, Any]) -> ToolResult | None:
        """The result of a call without running it: of an earlier one like it, or the breaker's."""
        key = self._make_key(arguments, kwargs)
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key]
        return self.find_refusal()

    def find_refusal(self) -> ToolResult | None:
        """The breaker's answer where a call may not run now."""
        if not self._failures or anyio.current_time() >= self._refuses_until:
            return None
        return error_result(
            f"{self.name!r} is not available: its last {self._failures} calls failed (the last "
            f"one: {self._last_failure}); not called"
        )

    def _make_key(self, arguments: Any, kwargs: Mapping[str, Any]) -> bytes:
        """What the result of a call is kept under; empty where it is not kept."""
        if not self.policy.cache_size:
            return b""
        try:
            return msgspec.json.encode((arguments, kwargs), order="deterministic")
        except Exception:  # kwargs may hold any object
            return b""

    def note_success(self, arguments: Any, kwargs: Mapping[str, Any], result: ToolResult) -> None:
        """A call was answered: keep its result; the one used longest ago makes room."""
        self._failures = 0
        if not result.is_error and (key := self._make_key(arguments, kwargs)):
            self._results[key] = result
            if len(self._results) > self.policy.cache_size:
                self._results.popitem(last=False)

    def note_failure(self, failure: str) -> None:
        """A call raised, or timed out."""
        self._failures, self._last_failure = self._failures + 1, failure
        limit, now = self.policy.breaker_failures, anyio.current_time()
        if limit is None or self._failures < limit or now < self._refuses_until:
            return
        self._refuses_until = now + self.policy.breaker_s
        logger.warning(
            "tool %r: %d calls in a row failed, the last with: %s; calls are refused for %g s",
            *(self.name, self._failures, failure, self.policy.breaker_s),
        )
