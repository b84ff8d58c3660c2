"""The open tools of one trajectory: opened once, asked for rewards, closed once."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rollout.containment import Contained, containment_here, current_containment
from rollout.errors import LimitExceeded, ToolError
from rollout.limits import Clock, Deadline, Limit
from rollout.tools.attempt import (
    CallError,
    attempt,
    conclude,
    describe_timeout,
    run_side_by_side,
)
from rollout.tools.function_tools import FunctionTool
from rollout.tools.results import read_reward
from rollout.tools.tool import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("rollout")


class OpenFailure(CallError):
    """A tool could not be opened; the text says why, for the model."""


class OpenSessions:
    """Sessions by tool, each opened and closed in one task: it may have a task group open.

    Args:
        tools: By name.
        context: Makes what a tool is opened for, by its name.
        tool_s, cleanup_s: Seconds for opening one and for its reward, and for closing one.

    Attributes:
        opened: Those that are open, in the order in which they were opened.
        reward: The sum of what those gave that decide the trajectory's reward; None where none did.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        context: Callable[[str], ToolContext],
        *,
        tool_s: float | None,
        cleanup_s: float,
    ) -> None:
        self._tools, self._context = tools, context
        self._tool_s, self._cleanup_s = tool_s, cleanup_s
        self.opened: dict[str, ToolSession] = {}
        self.reward: float | None = None
        #: Those that wait in the task in which they were opened, to be closed there.
        self._tasks: dict[str, Contained[None]] = {}

    async def open(self, name: str, turn: Limit, *, is_bounded: bool = True) -> None:
        """Open a tool.

        Once the caller is cancelled, the tool has another ``limits.cleanup_s`` to return a session,
        so that what it has acquired is also closed.

        Args:
            name: Of the tool.
            turn: The limit of the calls that need it.
            is_bounded: Whether ``limits.tool_s`` counts.

        Raises:
            OpenFailure: It raised, took longer than ``limits.tool_s``, or returned no session.
            LimitExceeded: `turn` was over.
        """
        tool, context = self._tools[name], self._context(name)
        limit = turn.open(self._tool_s if is_bounded else None, "limits.tool_s")
        stays = current_containment() is not None  # else its tasks end with the block below
        try:
            if isinstance(tool, FunctionTool):  # which has nothing to wait for
                self.opened[name] = tool.open_session(context)
                return
            async with containment_here() as containment:
                task = Contained[None](containment, f"open of tool {name!r}")

                async def serve() -> None:
                    session = await tool.open(context)
                    if not isinstance(session, ToolSession):
                        kind = type(session).__name__
                        raise ToolError(f"open returned {kind}; expected a ToolSession")
                    self.opened[name] = session
                    if stays and type(session).close is not ToolSession.close:
                        limit.release()
                        self._tasks[name] = task
                        await task.pause()
                        await session.close()

                await conclude(task, task.run(serve, grace_s=self._cleanup_s), limit)
        except LimitExceeded:
            if turn.is_over:
                raise
            why = describe_timeout(limit.deadline)
            raise OpenFailure(f"could not open {name!r}: {why}") from None
        except Exception as error:
            raise OpenFailure(f"could not open {name!r}: {error}") from error

    async def calc_rewards(self) -> list[float]:
        """Rewards of the open tools, in the order of their first use; what fails is logged.

        Raises:
            ToolError: The one that failed decides the trajectory's reward.
        """
        rewards: dict[str, float] = {}
        failures: list[ToolError] = []
        judges = self._find_overriding("calc_reward")
        jobs = [partial(self._calc_reward, name, rewards, failures) for name in judges]
        await run_side_by_side(jobs)
        if failures:
            raise failures[0]
        decided = [rewards[n] for n in judges if n in rewards and self.opened[n].decides_reward]
        self.reward = sum(decided) if decided else None
        return [rewards[name] for name in judges if name in rewards]

    async def _calc_reward(
        self, name: str, rewards: dict[str, float], failures: list[ToolError]
    ) -> None:
        session, what = self.opened[name], f"calc_reward of tool {name!r}"
        limit = Clock(Deadline.after(self._tool_s, "limits.tool_s"))
        try:
            value: Any = await attempt(session.calc_reward, limit=limit, what=what)
        except (CallError, LimitExceeded) as error:
            if session.decides_reward:
                failure = ToolError(f"tool {name!r}: calc_reward failed: {error}")
                failure.__cause__ = error
                failures.append(failure)
            else:
                logger.warning("tool %r: calc_reward failed: %s", name, error)
            return
        reward = read_reward(value)
        if reward is not None:
            rewards[name] = reward
        elif value is not None:
            text = "tool %r: calc_reward returned %.80r; expected a finite number"
            logger.warning(text, name, value)

    def _find_overriding(self, method: str) -> list[str]:
        """Names of the open sessions that do not leave this method as it is."""
        default = getattr(ToolSession, method)
        return [n for n, each in self.opened.items() if getattr(type(each), method) is not default]

    async def close(self) -> None:
        """Close every session once, the last opened first, each within ``limits.cleanup_s``.

        Shielded from cancellation; errors and overruns are logged. Ctrl-C (and on asyncio a bare
        `Task.cancel`) ends one session's close at once and is raised when all have had theirs.
        Where a close is given up with its task, another call closes the others.
        """
        interruption: BaseException | None = None
        for name in reversed(self._find_overriding("close")):
            session, what = self.opened.pop(name), f"close of tool {name!r}"
            limit = Clock(Deadline.after(self._cleanup_s, "limits.cleanup_s"))
            try:
                with anyio.CancelScope(shield=True):
                    task = self._tasks.pop(name, None)
                    if task is None:
                        await attempt(session.close, limit=limit, what=what)
                    else:
                        task.what = what
                        await conclude(task, task.finish(), limit)
            except (CallError, LimitExceeded) as error:
                logger.warning("tool %r: close failed: %s", name, error)
            except BaseException as error:
                interruption = interruption or error
        self.opened.clear()
        if interruption is not None:
            raise interruption
