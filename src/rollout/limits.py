"""Deadlines that name their limit, and the limits of a trajectory, which can be paused.

An inner limit ends with the outer one at the latest, and names that one then. The scope that fires
therefore always says which limit of the configuration ended the work.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.bridge import loop_clock
from rollout.errors import AgentError, LimitExceeded
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The key of `Prompt.extra` that bounds the agent's time. It ends the agent as limits of turns or
#: calls do: what the agent has done until then counts, and is rewarded.
AGENT_TIMEOUT_S = "agent_timeout_s"
AGENT_TIMEOUT = f"extra.{AGENT_TIMEOUT_S}"
#: The limit of a carried trajectory that has tools open.
CARRY_S = "limits.carry_s"

#: Shields clean-up from cancellation, and bounds its seconds, so that it runs and cannot hang.
cleanup_scope = partial(anyio.move_on_after, shield=True)


class Deadline(msgspec.Struct, frozen=True, gc=False):
    """An absolute time (`anyio.current_time`) and the limit it comes from, e.g. ``limits.tool_s``.

    Attributes:
        at: Absolute clock time; infinite where there is no limit.
        source: Path of the limit in the configuration.
        seconds: The limit itself, for messages.
    """

    at: float
    source: str
    seconds: float

    @classmethod
    def after(cls, seconds: float | None, source: str) -> Deadline:
        """The deadline `seconds` from now; with None there is no limit."""
        length = math.inf if seconds is None else seconds
        return cls(anyio.current_time() + length, source, length)

    def later(self, seconds: float) -> Deadline:
        """The same limit `seconds` later."""
        return Deadline(self.at + seconds, self.source, self.seconds)

    def error(self) -> LimitExceeded:
        """What a trajectory that meets this deadline ends with."""
        return LimitExceeded(
            f"{self.source} = {self.seconds:g} s is over",
            source=self.source,
            reason=self.source.rpartition(".")[2].removesuffix("_s"),
            outcome=Outcome.LIMIT if self.source == AGENT_TIMEOUT else Outcome.DEADLINE,
        )


#: No limit.
NEVER = Deadline(math.inf, "", math.inf)


class Limit:
    """One limit of a trajectory, within that of the code that opened it; see `open`.

    Limits are a tree, whose root is the trajectory's `Clock`. One that is paused stands still, with
    all that were opened within it; those around it go on. As a context manager a limit ends one
    block. One whose time has come stays over, whatever is paused then.

    Attributes:
        source, seconds: As of a `Deadline`.
    """

    # There are one or two for each trajectory that waits.
    __slots__ = (
        "_due",
        "_end",
        "_is_block",
        "_lost_s",
        "_outer",
        "_pauses",
        "_scope",
        "_stopped_at",
        "seconds",
        "source",
    )

    def __init__(self, due: float, source: str, seconds: float, outer: Limit | None) -> None:
        self.source, self.seconds, self._outer = source, seconds, outer
        self._due = due  # by its own time, which is the loop's less all pauses
        self._pauses, self._stopped_at, self._lost_s = 0, 0.0, 0.0
        #: When the governed scope ends, and which limit around it ends then, None for its own: an
        #: object that refers to itself lives until the next full collection.
        self._end: tuple[float, Limit | Deadline | None] | None = None
        self._scope: anyio.CancelScope | None = None
        self._is_block = False  # whether it governs its own block, and no other code's scope

    def open(self, seconds: float | None, source: str, *, since: float | None = None) -> Limit:
        """A limit within this one; with None it ends when this one does.

        Args:
            since: When it began, by `own_time`; None: now.
        """
        length = math.inf if seconds is None else seconds
        began = self.own_time() if since is None else since
        return Limit(began + length, source, length, self)

    @property
    def clock(self) -> Clock:
        """The trajectory's: the root."""
        assert self._outer is not None
        return self._outer.clock

    @property
    def deadline(self) -> Deadline:
        """When it ends, as things stand, and which limit ends it then: itself, or one around it.

        Of two that end at the same time that is the outer one.
        """
        at, first = self._end or self._find_end()
        first = first or self
        return Deadline(at, first.source, first.seconds)

    @property
    def ends_at(self) -> float:
        """The time of its `deadline`."""
        return (self._end or self._find_end())[0]

    @property
    def is_over(self) -> bool:
        """Whether its time has come."""
        return self.clock.now() >= self.ends_at

    @property
    def is_outer_over(self) -> bool:
        """Whether the time of the limit around it has come."""
        return self._outer is not None and self._outer.is_over

    def own_time(self) -> float:
        """The loop's time less all pauses."""
        if self._pauses:
            return self._stopped_at
        return (self._outer.own_time() if self._outer else self.clock.now()) - self._lost_s

    def pause(self) -> None:
        """Stop its time until `resume` was called as often as `pause`."""
        self._stopped_at = self.own_time()
        self._pauses += 1
        self.clock.renew_all()

    def resume(self) -> None:
        """End one `pause`."""
        self._pauses -= 1
        if not self._pauses:
            self._lost_s += self.own_time() - self._stopped_at
        self.clock.renew_all()

    def govern(self, scope: anyio.CancelScope) -> None:
        """Keep the deadline of this scope right, until `release`."""
        self._scope, self._is_block = scope, False
        self.renew()
        self.clock.governed += (self,)

    def renew(self) -> None:
        """Set the deadline of the governed scope, as things stand."""
        assert self._scope is not None
        self._end = self._find_end()
        self._scope.deadline = self._end[0]

    def release(self) -> None:
        """Govern the scope no more: it is left."""
        clock, self._scope = self.clock, None
        clock.governed = tuple([each for each in clock.governed if each is not self])

    def __enter__(self) -> Limit:
        self._end, self._is_block = self._find_end(), True
        self._scope = anyio.CancelScope(deadline=self._end[0])  # cheaper than one set later
        self.clock.governed += (self,)
        self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        scope = self._scope
        assert scope is not None
        self.release()
        is_caught: bool | None = scope.__exit__(*error)
        if is_caught and self.is_over:
            raise self.deadline.error()
        if is_caught and error[0] is not None:  # by `cancel_all`
            raise AgentError("the trajectory has ended")
        return is_caught

    def _find_end(self) -> tuple[float, Limit | Deadline | None]:
        around, at = self._find_outer_end(), self._due + self._find_shift_s()
        return (at, None) if at < around[0] else around

    def _find_outer_end(self) -> tuple[float, Limit | Deadline]:
        assert self._outer is not None
        at, first = self._outer._end or self._outer._find_end()
        return at, first or self._outer

    def _find_shift_s(self) -> float:
        """How far its own time is behind the loop's; infinite while it is paused."""
        if self._pauses:
            return math.inf
        return self._lost_s + (self._outer._find_shift_s() if self._outer else 0.0)


class Clock(Limit):
    """The root of a trajectory's limits: its own deadline, and whether it is carried.

    A trajectory that is carried from one call to the next is paused, and waits in front of the
    engines until it is resumed.

    Args:
        deadline: The trajectory's.

    Attributes:
        now: The loop's time.
        governed: Limits that govern a scope each.
        owner: Its `limit_carry` gives the deadline of a trajectory that is carried since a time.
        carried_since: When it began to be carried; None while it is not.
    """

    __slots__ = ("_carried_s", "_resumed", "carried_since", "governed", "now", "owner")

    def __init__(self, deadline: Deadline = NEVER, now: Callable[[], float] | None = None) -> None:
        super().__init__(deadline.at, deadline.source, deadline.seconds, None)
        self.now = now or loop_clock()
        self.governed: tuple[Limit, ...] = ()
        self.owner: Any = None
        self.carried_since: float | None = None
        self._carried_s = 0.0
        self._resumed: anyio.Event | None = None  # once it was carried

    @property
    def clock(self) -> Clock:
        """Itself."""
        return self

    def renew_all(self) -> None:
        """Give governed scopes their deadlines anew: a limit was paused, resumed or changed."""
        for limit in self.governed:
            if not limit.is_over:  # else it has fired, or does so next
                limit.renew()

    def cancel_all(self) -> None:
        """Cancel the blocks of all limits: their tasks were left behind by an agent that ended."""
        for limit in self.governed:
            if limit._is_block and limit._scope is not None:  # not tools: none is to blame
                limit._scope.cancel()

    def carry(self) -> None:
        """Pause all limits, and have the trajectory wait before its next request."""
        self.carried_since, self._resumed = self.now(), anyio.Event()
        self.pause()

    def continue_carried(self, deadline: Deadline) -> None:
        """Let it continue with this deadline; inner limits keep the time that they had left."""
        self._carried_s, self.carried_since = self.carried_s(self.now()), None
        self._due = deadline.at + self.own_time() - self.now()
        self.source, self.seconds = deadline.source, deadline.seconds
        self.resume()
        assert self._resumed is not None
        self._resumed.set()

    def carried_s(self, until: float) -> float:
        """How long it was carried up to that clock time, in all."""
        since = self.carried_since
        return self._carried_s + (0.0 if since is None else max(0.0, until - since))

    def end_wait(self) -> None:
        """Let a cancelled trajectory wait no more: its agent may have shielded itself."""
        if self._resumed is not None:
            self._resumed.set()

    async def wait_carried(self) -> None:
        """Wait until the trajectory is not carried."""
        if self.carried_since is not None:
            self.renew_all()  # it may have opened tools meanwhile, for which there is a limit
            assert self._resumed is not None
            await self._resumed.wait()

    def _find_outer_end(self) -> tuple[float, Limit | Deadline]:
        bound = NEVER  # ends it even while it is paused
        if self.carried_since is not None and self.owner is not None:
            bound = self.owner.limit_carry(self.carried_since)
        return bound.at, bound


#: The limit of the tool call whose code runs here, where it has one.
call_limit: ContextVar[Limit | None] = ContextVar("rollout_call", default=None)


@contextmanager
def paused_call() -> Iterator[None]:
    """Pause the limit of the tool call around the block, if there is one."""
    limit = call_limit.get() or Clock()
    limit.pause()
    try:
        yield
    finally:
        limit.resume()
