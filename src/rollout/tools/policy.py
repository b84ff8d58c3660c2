"""How the calls of one tool are run: time limit, retries, concurrency, rate, cache and breaker."""

from __future__ import annotations

import itertools
import logging
import math
import typing
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import msgspec

from rollout.config.checks import Count, Natural, Positive, Rule, validate
from rollout.errors import ToolError
from rollout.scopes import release_token
from rollout.tools.attempt import attempt
from rollout.tools.results import ToolResult, error_result, normalise_result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from rollout.limits import Limit

logger = logging.getLogger("rollout")
_NO_SLOT = nullcontext()
ExceptionTypes = Annotated[
    object,
    Rule(
        "a tuple of exception types",
        lambda kinds: all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds),
    ),
]


def check_options(what: str, **options: tuple[Any, Any]) -> None:
    """Check values, each given with its rule.

    Raises:
        ToolError: It begins with `what`, and lists every value that is out of bounds.
    """
    found = {name: validate(rule, value)[1] for name, (rule, value) in options.items()}
    if faults := [str(each.below(name)) for name, faults in found.items() for each in faults]:
        raise ToolError(f"{what}: {'; '.join(faults)}")


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
        rules["transient"] = ExceptionTypes
        check_options("ToolPolicy", **{n: (rule, getattr(self, n)) for n, rule in rules.items()})

    def is_transient(self, error: BaseException) -> bool:
        """Whether a call that failed with `error` is worth another try."""
        return isinstance(error, (TransientError, *self.transient))


class ToolGate:
    """Runs the calls of one tool as its policy says, for all trajectories of a runtime.

    Attributes:
        check: Makes the arguments that it gets, of the model's and the prompt's kwargs.
        has_queue: Whether calls may wait for a slot.
    """

    def __init__(
        self,
        name: str,
        check: Callable[[Any, Mapping[str, Any]], dict[str, Any]],
        policy: ToolPolicy,
        tool_s: float | None,
    ) -> None:
        self.name, self.check, self.policy = name, check, policy
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
                self._failures = 0
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
