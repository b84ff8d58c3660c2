"""The open tools of one trajectory: opened once, asked for rewards, closed once."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rollout.containment import Contained, current_containment
from rollout.errors import LimitExceeded, ToolError
from rollout.limits import Clock, Deadline, Limit
from rollout.tools.attempt import CallError, attempt, conclude, run_side_by_side
from rollout.tools.function import FunctionTool
from rollout.tools.results import as_reward
from rollout.tools.tool import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

logger = logging.getLogger("rollout")

_NO_STATE = object()
_NOT_TOLD = -1, _NO_STATE


class OpenFailure(CallError):
    """A tool could not be opened; the text says why, for the model."""


class OpenSessions:
    """Sessions by tool, each opened and closed in one task: it may have a task group open.

    Attributes:
        opened: Those that are open, by tool. Calls under way keep what they found here, of which
            nothing is taken away.
        is_closed: Whether they were closed.
        reward: The sum of what those gave that decide the trajectory's reward; None where none did.
        unrestored: A tool that could not be given the state that it had, and why; "" where all were
            that had to be.
    """

    __slots__ = (
        "_cleanup_s",
        "_contexts",
        "_ending",
        "_recalled",
        "_tasks",
        "_tool_s",
        "_tools",
        "is_closed",
        "opened",
        "reward",
        "unrestored",
    )

    def __init__(
        self,
        tools: Mapping[str, Tool],
        contexts: Mapping[str, ToolContext],
        *,
        tool_s: float | None,
        cleanup_s: float,
    ) -> None:
        self._tools = tools
        self._contexts = contexts
        self._tool_s = tool_s
        self._cleanup_s = cleanup_s
        self.opened: dict[str, ToolSession] = {}
        self.reward: float | None = None
        #: Those that are to be closed, the last one first.
        self._ending: list[tuple[str, ToolSession]] = []
        #: In which those were opened that are closed in the same task, by their `id`.
        self._tasks: dict[int, Contained[None]] = {}
        self.is_closed, self.unrestored = False, ""
        #: Of tools that were used before a trajectory was resumed: the number of the last answer
        #: that told their state, and that, until they are opened with it.
        self._recalled: dict[str, tuple[int, Any]] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.opened and not (self._recalled and self._is_replaced(name))

    def _is_replaced(self, name: str) -> bool:
        """Whether it is to be opened with another state than it has."""
        recalled = self._recalled or {}
        return recalled.get(name, _NOT_TOLD)[1] is not _NO_STATE

    @property
    def are_stateful(self) -> bool:
        """Whether one of those open is of a tool that is no plain function."""
        return any(not isinstance(self._tools[name], FunctionTool) for name in self.opened)

    def opens_at_once(self, name: str) -> bool:
        """Whether `open` of this tool waits for nothing."""
        return isinstance(self._tools[name], FunctionTool)

    async def open(
        self, name: str, turn: Limit, *, is_alone: bool = True, is_first: bool = False
    ) -> None:
        """Open a tool that is not open, or has another state than the one that was recalled.

        Args:
            name: Of the tool.
            turn: The limit of the calls that need it.
            is_alone: Whether no other calls are under way: a session that is replaced is closed
                then, else at the end.
            is_first: Before the agent begins: ``limits.tool_s`` does not count.

        Raises:
            OpenFailure: It raised, took longer than ``limits.tool_s``, or returned no session.
            ToolError: It cannot have the state that it had before the trajectory was resumed, which
                no other state can stand for.
            LimitExceeded: `turn` was over.
        """
        if name in self.opened:
            others = dict(self.opened)
            self._ending.append((name, others.pop(name)))
            self.opened = others
            if is_alone:
                await self._close_ending()
        tool, context = self._tools[name], self._contexts[name]
        limit = turn.open(None if is_first else self._tool_s, "limits.tool_s")
        restored: ToolSession | None = None

        def failure(why: str) -> Exception:
            if restored is None:
                return OpenFailure(f"could not open {name!r}: {why}")
            self.unrestored = f"restore of tool {name!r} failed: {why}"
            return ToolError(self.unrestored)

        async def keep_session() -> None:
            nonlocal restored
            session = await tool.open(context)
            if not isinstance(session, ToolSession):
                raise ToolError(f"open returned {type(session).__name__}; expected a ToolSession")
            if self._recalled and name in self._recalled:
                number, state = self._recalled[name]
                if state is not _NO_STATE:
                    restored = session
                    await session.restore(state)
                    restored = None
                self._recalled[name] = number, _NO_STATE
            self.opened[name] = session
            if task is not None and type(session).close is not ToolSession.close:
                limit.release()
                self._tasks[id(session)] = task
                await task.wait_for_call(session.close)

        what, containment = f"open of tool {name!r}", current_containment()
        task = None if containment is None else Contained[None](containment, what)
        try:
            if isinstance(tool, FunctionTool):
                self.opened[name] = tool.session(context)
            elif task is None:
                await attempt(keep_session, limit=limit, what=what, grace_s=self._cleanup_s)
            else:
                await conclude(task, task.run(keep_session, grace_s=self._cleanup_s), limit)
        except LimitExceeded:
            if turn.is_over:
                raise
            raise failure(timed_out(limit.deadline)) from None
        except Exception as error:
            raise failure(str(error)) from error
        finally:
            if restored is not None:
                self._ending.append((name, restored))

    def recall(self, names: Iterable[str], snapshots: Mapping[str, Any], number: int) -> None:
        """Tools that were called before a trajectory was resumed, and their states after that.

        Of several answers the one with the highest number tells: conversations side by side may get
        theirs in another order than the first time.

        A session that is open has another state, where a call between them was made again, and
        counts as not open: `restore` is for new ones.
        """
        recalled = self._recalled = {} if self._recalled is None else self._recalled
        for name in names:
            if not isinstance(self._tools[name], FunctionTool):
                recalled.setdefault(name, _NOT_TOLD)
        for name, state in snapshots.items():
            if name in self._tools and number > recalled.get(name, _NOT_TOLD)[0]:
                recalled[name] = number, state

    async def states(self, names: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
        """Those of the tools that have a state which cannot be held, and the states of others."""
        lost, held = [], {}
        able = dict(self._overriding("snapshot"))
        for name in dict.fromkeys(names):
            if not self._tools[name].stateful or name not in self.opened:
                continue
            if name not in able:
                lost.append(name)
                continue
            limit = Clock(Deadline.after(self._tool_s, "limits.tool_s"))
            what = f"snapshot of tool {name!r}"
            try:
                held[name] = await attempt(able[name].snapshot, limit=limit, what=what)
            except (CallError, LimitExceeded) as error:
                logger.warning("tool %r: snapshot failed: %s", name, error)
                lost.append(name)
        return lost, held

    async def _open_recalled(self) -> None:
        """What was used before has its say about the trajectory too."""
        for name in [name for name in self._recalled or () if name not in self]:
            try:
                await self.open(name, Clock())  # it has a limit of its own
            except (OpenFailure, LimitExceeded) as error:
                logger.warning("tool %r: has no reward of a resumed trajectory: %s", name, error)

    async def calc_rewards(self) -> list[float]:
        """Rewards of the open tools, in the order of their first use; what fails is logged.

        Raises:
            ToolError: The one that failed decides the trajectory's reward.
        """
        await self._open_recalled()
        rewards: dict[str, float] = {}
        asked = self._overriding("calc_reward")
        if asked:
            failures: list[ToolError] = []
            jobs = [partial(self._ask_reward, rewards, failures, *pair) for pair in asked]
            await run_side_by_side(jobs)
            if failures:
                raise failures[0]
            decided = [rewards[n] for n, each in asked if each.decides_reward and n in rewards]
            self.reward = sum(decided) if decided else None
        return [rewards[name] for name, _ in asked if name in rewards]

    async def _ask_reward(
        self,
        rewards: dict[str, float],
        failures: list[ToolError],
        name: str,
        session: ToolSession,
    ) -> None:
        limit = Clock(Deadline.after(self._tool_s, "limits.tool_s"))
        try:
            value: Any = await attempt(
                session.calc_reward,
                limit=limit,
                what=f"calc_reward of tool {name!r}",
            )
        except (CallError, LimitExceeded) as error:
            if session.decides_reward:
                failure = ToolError(f"tool {name!r}: calc_reward failed: {error}")
                failure.__cause__ = error
                failures.append(failure)
            else:
                logger.warning("tool %r: calc_reward failed: %s", name, error)
            return
        reward = as_reward(value)
        if reward is not None:
            rewards[name] = reward
        elif value is not None:
            logger.warning(
                "tool %r: calc_reward returned %.80r; expected a finite number", name, value
            )

    def _overriding(self, method: str) -> list[tuple[str, ToolSession]]:
        """The open sessions that do not leave this method as it is: most do, and cost nothing."""
        default = getattr(ToolSession, method)
        return [
            (name, session)
            for name, session in self.opened.items()
            if getattr(type(session), method) is not default
        ]

    async def close(self) -> None:
        """Close every session once, the last opened first, each within ``limits.cleanup_s``.

        Shielded from cancellation; errors and overruns are logged. Ctrl-C (and on asyncio a bare
        `Task.cancel`) ends one session's close at once and is raised when all have had theirs.
        Where a close is given up with its task, another call closes the others.
        """
        self.is_closed = True
        self._ending += self._overriding("close")
        self.opened = {}
        await self._close_ending()

    async def _close_ending(self) -> None:
        interruption: BaseException | None = None
        while self._ending:
            name, session = self._ending.pop()
            limit = Clock(Deadline.after(self._cleanup_s, "limits.cleanup_s"))
            try:
                with anyio.CancelScope(shield=True):
                    task, what = self._tasks.pop(id(session), None), f"close of tool {name!r}"
                    if task is None:
                        await attempt(session.close, limit=limit, what=what)
                    else:
                        task.what = what
                        await conclude(task, task.finish(), limit)
            except (CallError, LimitExceeded) as error:
                logger.warning("tool %r: close failed: %s", name, error)
            except BaseException as error:
                interruption = interruption or error
        if interruption is not None:
            raise interruption


def timed_out(deadline: Deadline) -> str:
    """What a call that met its deadline is answered with."""
    return f"timed out after {deadline.seconds:g} s ({deadline.source})"
