"""What all trajectories share of one tool: its places, its pace, its breaker and its cache."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import anyio
import msgspec

from rollout.scopes import release_token
from rollout.tools.policy import speaks_of_call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from rollout.tools.policy import ToolPolicy
    from rollout.tools.results import ToolResult

logger = logging.getLogger("rollout")

#: What "auto" takes for a tool that is down: so many failures in a row, from so many trajectories.
_AUTO_FAILURES, _AUTO_CALLERS = 64, 8


class Breaker:
    """Refuses calls of a tool that keeps failing; a state machine that owns no task.

    Closed it lets every call through. `failures` in a row open it for `pause_s`, after which one
    call is let through: its success closes it, its failure opens it again. "auto" wants many
    failures, from several trajectories, that do not speak of the calls.
    """

    def __init__(self, name: str, failures: int | Literal["auto"] | None, pause_s: float) -> None:
        self._name = name
        self._is_auto = failures == "auto"
        self._failures = _AUTO_FAILURES if failures == "auto" else failures
        self._callers: set[object] = set()
        self._pause_s = pause_s
        self._in_a_row = 0
        self._last = ""
        self._opens_until: float | None = None
        self._is_probing = False

    def refusal(self, now: float) -> str | None:
        """Why a call may not run now; None where it may, and then its end must be reported."""
        if self._opens_until is None:
            return None
        if now >= self._opens_until and not self._is_probing:
            self._is_probing = True
            return None
        return (
            f"{self._name!r} is not available: its last {self._in_a_row} calls failed "
            f"(the last one: {self._last}); not called"
        )

    def succeed(self) -> None:
        """A call that was let through was answered."""
        self._is_probing = False
        self._in_a_row, self._opens_until = 0, None
        self._callers.clear()

    def fail(self, failure: str, error: BaseException, caller: object, now: float) -> None:
        """A call of `caller`'s that was let through raised `error`, or timed out."""
        if self._is_auto and speaks_of_call(error):
            self.succeed()
            return
        was_probe, self._is_probing = self._is_probing, False
        self._in_a_row += 1
        self._last = failure
        if len(self._callers) < _AUTO_CALLERS:
            self._callers.add(caller)
        is_enough = self._failures is not None and self._in_a_row >= self._failures
        if self._is_auto and len(self._callers) < _AUTO_CALLERS:
            is_enough = False
        if is_enough and (self._opens_until is None or was_probe):
            self._opens_until = now + self._pause_s
            logger.warning(
                "tool %r: %d calls in a row failed, the last with: %s; calls are refused for %g s",
                self._name,
                self._in_a_row,
                failure,
                self._pause_s,
            )

    def forget(self) -> None:
        """The call that was let through ended without a result, as by cancellation."""
        self._is_probing = False


class RateLimiter:
    """Lets callers pass one after another, no more than `per_s` in a second."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        self._next_at = 0.0
        self._turn = anyio.Lock()

    async def wait(self) -> None:
        """Wait for this caller's turn; one that is cancelled gives its turn to the next."""
        async with self._turn:
            await anyio.sleep_until(self._next_at)
            self._next_at = max(self._next_at, anyio.current_time()) + self._interval_s


class ToolGate:
    """The way to one tool, for all trajectories.

    Attributes:
        policy: The tool's.
        what: The tool, for messages.
        breaker: Refuses calls while the tool keeps failing.
        has_queue: Whether calls may have to wait for their `place`.
        never_waits: Whether a call, once it has its place, ends in the step in which it begins.
    """

    def __init__(self, name: str, policy: ToolPolicy, *, never_waits: bool = False) -> None:
        self.policy = policy
        self.never_waits = never_waits
        self.what = f"tool {name!r}"
        self.breaker = Breaker(name, policy.breaker_failures, policy.breaker_s)
        most = policy.max_concurrency
        self._places = None if most is None else anyio.CapacityLimiter(most)
        self._rate_limiter = (
            None if policy.rate_limit_per_s is None else RateLimiter(policy.rate_limit_per_s)
        )
        self.has_queue = self._places is not None or self._rate_limiter is not None
        self._cache: OrderedDict[bytes, ToolResult] = OrderedDict()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One of `max_concurrency` places, once the pace allows it; at once without a queue."""
        with contextlib.ExitStack() as places:
            if self._places is not None:
                borrower = object()
                places.callback(release_token, self._places, borrower)
                await self._places.acquire_on_behalf_of(borrower)
            if self._rate_limiter is not None:
                await self._rate_limiter.wait()
            yield

    @asynccontextmanager
    async def place_in_line(self, line: anyio.Lock) -> AsyncIterator[None]:
        """`place`, for calls that must not run at once, also of several conversations."""
        async with line, self.place():
            yield

    def key(self, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]) -> bytes | None:
        """What the result of a call is kept under; None where it is not kept."""
        if not self.policy.cache_size:
            return None
        try:
            return msgspec.json.encode((arguments, kwargs), order="deterministic")
        except Exception:  # kwargs may hold any object
            return None

    def kept(self, key: bytes) -> ToolResult | None:
        """The result of an earlier call like this one."""
        if key not in self._cache:
            return None
        self._cache.move_to_end(key)
        return self._cache[key]

    def keep(self, key: bytes, result: ToolResult) -> None:
        """Keep a result for later calls; the one used longest ago makes room."""
        if result.is_error:
            return
        self._cache[key] = result
        self._cache.move_to_end(key)
        while len(self._cache) > self.policy.cache_size:
            self._cache.popitem(last=False)
