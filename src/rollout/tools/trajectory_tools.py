"""The tools of one trajectory: calls in, one result for each of them out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.errors import ToolError
from rollout.limits import Clock
from rollout.tools.open_sessions import OpenFailure
from rollout.tools.results import with_error
from rollout.tools.running_calls import RunningCalls
from rollout.types import InvalidToolCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rollout.tools.answers import Answers, States
    from rollout.tools.results import ToolResult


class TrajectoryTools(RunningCalls):
    """The tools of one trajectory, used and closed in the trajectory's own task.

    Attributes:
        seconds: Time in calls, on the loop's clock; calls at the same time add up.
        calls: Calls of the model's that have ended, also those that no tool could answer.
        errors: Those of them whose answer is an error, whatever its cause, or that were cancelled.
        is_closed: Whether they were closed.
        invalid_in_a_row: Latest calls in a row that could not be run as asked: not parsed, of an
            unknown tool, or with wrong arguments.
    """

    __slots__ = ()

    def has_open_sessions(self) -> bool:
        """Whether a tool is open that may hold something: plain functions hold nothing."""
        sessions = self._sessions
        return sessions is not None and not sessions.is_closed and sessions.are_stateful

    @property
    def unrestored(self) -> str:
        """See `OpenSessions`."""
        return "" if self._sessions is None else self._sessions.unrestored

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools offered to this trajectory."""
        return tuple(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools offered to this trajectory."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def reward(self) -> float | None:
        """The sum of what tools gave that decide the trajectory's reward; None where none did."""
        return None if self._sessions is None else self._sessions.reward

    async def open_first(self) -> list[str | Sequence[Mapping[str, Any]]]:
        """Open and begin the tools with `Tool.opens_first`; what they observe, in their order.

        What `ToolSession.begin` raises leaves as itself.

        Raises:
            ToolError: One could not be opened.
        """
        agents = Clock()  # which `limits.trajectory_s` bounds
        for name, tool in self._tools.items():
            if tool.opens_first and name not in self.sessions:
                try:
                    await self.sessions.open(name, agents, is_first=True)
                except OpenFailure as error:
                    raise ToolError(str(error)) from error.__cause__
        observations = [await each.begin() for each in list(self.sessions.opened.values())]
        return [each for each in observations if each is not None]

    def recall(
        self,
        calls: Sequence[ToolCall | InvalidToolCall],
        answers: Answers,
        offered: Collection[str] | None = None,
    ) -> list[ToolResult]:
        """As `run`, with the answers of before; no tool runs."""
        turn = self._turn(calls, Clock(), offered)
        self.seconds += answers.seconds
        for position, call in turn.pending:
            turn.results[position] = answers.results[position]
            self._ended(turn, position, call, 0.0, answers.seconds / len(turn.pending))
        names = [call.name for _, call in turn.pending]
        self.sessions.recall(names, answers.snapshots, answers.number)
        return self._count(calls, list(answers.results))

    def note_refused_media(self, name: str) -> None:
        """Count an answer as an error after all: the model is shown none of its media."""
        self.errors += 1
        self.kit.tally.tool_errors += 1
        if name in self._counts:
            self._counts = with_error(self._counts, name)

    async def states_after(self, calls: Sequence[ToolCall | InvalidToolCall]) -> States:
        """Of the tools called: those with a state that nobody can hold, and the states of others.

        While other calls are under way no state is one that a trajectory could continue from.
        """
        named = [call.name for call in calls if isinstance(call, ToolCall)]
        names = [name for name in named if name in self._tools and self._tools[name].stateful]
        if not names or self._sessions is None:
            return [], {}
        if self._turns_under_way:
            return [name for name in names if name in self._sessions], {}
        return await self._sessions.states(names)

    async def calc_rewards(self) -> list[float]:
        """Rewards of the tools that were used, in the order of their first use.

        A tool without a reward has no entry, nor has one whose `calc_reward` fails or takes longer
        than ``limits.tool_s``: that is logged.

        Raises:
            ToolError: The one that failed decides the trajectory's reward.
        """
        return [] if self._sessions is None else await self._sessions.calc_rewards()

    async def close(self) -> None:
        """Close every session once, the last opened first, each within ``limits.cleanup_s``.

        Shielded from cancellation; errors and overruns are logged, never raised.
        """
        self.is_closed = True
        if self._sessions is not None:
            await self._sessions.close()
