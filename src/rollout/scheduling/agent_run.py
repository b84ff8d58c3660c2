"""One attempt at a trajectory: its agent, in a task of its own."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import anyio

from rollout.agents.agent_loop import AgentLoop, class_of, make_agent
from rollout.agents.identity import RejectedPrompt
from rollout.containment import Contained, UnresponsiveError
from rollout.errors import EngineError, LimitExceeded
from rollout.observe.user_spans import enter_trajectory
from rollout.scopes import unwrap_group
from rollout.types import Cause, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.agents.agent_loop import Registered
    from rollout.agents.context import AgentContext
    from rollout.chat.trajectory import Trajectory
    from rollout.containment import Containment
    from rollout.limits import Deadline
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.scheduling.prompts import Member


class MemberHome(Protocol):
    """Whom a member belongs to.

    Attributes:
        has_groups: Whether several members may begin with one prompt.
    """

    has_groups: bool

    async def end(self, run: AgentRun, trajectory: Trajectory) -> None:
        """A member of it has ended. May wait, and holds the member's place meanwhile."""


class Before(NamedTuple):
    """What became of earlier attempts at a trajectory.

    Attributes:
        attempts: How many there were.
        discarded, resumes, restarts: What a trajectory says of them, of these attempts.
        calls: What it says of their calls; see `rollout.scheduling.finished.calls_of`.
    """

    attempts: int = 0
    discarded: int = 0
    resumes: int = 0
    restarts: tuple[str, ...] = ()
    calls: Mapping[str, float] = MappingProxyType({})


_NONE_BEFORE = Before()


class AgentRun:
    """One attempt at a member's trajectory.

    Attributes:
        containment: Has the agent's task.
        member: Whose trajectory it is.
        home: Gets the trajectory.
        batch_deadline: That of the call.
        what: The agent, for messages.
        started: When the first attempt began, on the loop's clock.
        before: The attempts before this one.
        deadline_left: The trajectory's, where an attempt before has put it off; else None.
        rejection: Why there is no agent.
        code: The agent, once it runs.
        cause: Root cause of its failure.
        stuck: Clean-up that did not end.
    """

    def __init__(
        self, containment: Containment, member: Member, home: MemberHome, batch_deadline: Deadline
    ) -> None:
        self.containment = containment
        self.member, self.home = member, home
        self.batch_deadline = batch_deadline
        self.what = "an agent"
        self.started = containment.clock()
        self.before = _NONE_BEFORE
        self.deadline_left: Deadline | None = None
        self.rejection: RejectedPrompt | None = None
        self.code: Contained[None]
        self.cause: Cause | None = None
        self.stuck: tuple[UnresponsiveError, ...] = ()
        self._context: AgentContext | None = None

    @property
    def attempt(self) -> int:
        """Its number, from 1."""
        return self.before.attempts + 1

    @property
    def context(self) -> AgentContext:
        """The agent's."""
        assert self._context is not None
        return self._context

    @property
    def unresponsive(self) -> UnresponsiveError | None:
        """What did not end of the agent, or of what it called; else a tool that did not close."""
        first = self.code.stopped_within or self.code.unresponsive
        has_failed = self.code.error is not None or self.code.was_cancelled
        if first is None and self.stuck and not has_failed:
            return self.stuck[0]
        return first

    @property
    def tokens(self) -> int:
        """Sampled in this attempt, in generations that have ended."""
        rows = [row for each in self.context.main.all() for row in each.rows]
        return sum(row.transcript.generated_length for row in rows)

    def cancel(self) -> None:
        """End the agent."""
        self.code.cancel()

    async def play(self, loop: Registered, context: AgentContext) -> None:
        """Run the agent to its end, and close its tools; cancelling the member ends it."""
        member, clock = self.member, self.containment.clock
        self._context, self.what = context, _name_of(loop)
        self.code = Contained[None](self.containment, self.what, activity=context.identity)
        member.concluding_since = None
        context.deadline.govern(self.code)
        member.give_scope(self)
        try:
            await self.code.run(partial(_run_agent, loop, context))
        except UnresponsiveError:
            pass  # `unresponsive` says so
        finally:
            member.scope, member.concluding_since = None, clock()
            if self.code.error is not None:
                self.cause = _failed(context, self.code.error)
            await self._close(context)
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def _close(self, context: AgentContext) -> None:
        with anyio.CancelScope(shield=True):
            while True:
                try:
                    return await context.close()
                except UnresponsiveError as error:  # of one of its tools
                    self.stuck = (*self.stuck, error)

    def again(self, calls: Mapping[str, float]) -> AgentRun:
        """Another attempt, from the start; what this one sampled is discarded.

        Args:
            calls: What there is to say of the calls so far.
        """
        context, before = self.context, self.before
        run = AgentRun(self.containment, self.member, self.home, self.batch_deadline)
        run.started, run.deadline_left = self.started, context.deadline.now
        run.before = Before(
            self.attempt,
            before.discarded + context.discarded_tokens + self.tokens,
            before.resumes + context.resumes,
            (*before.restarts, *context.restarts),
            calls,
        )
        return run

    @property
    def sandbox(self) -> TrajectorySandbox | None:
        """That of this attempt, where it has used one; it is to be closed."""
        sandbox = None if self._context is None else self._context.sandbox_asked_for
        return sandbox if sandbox is not None and sandbox.was_used else None

    def forget(self) -> None:
        """It is concluded: its context is not needed any more."""
        self._context = None


async def _run_agent(loop: Registered, context: AgentContext) -> None:
    """The agent's task."""
    if context.events.is_on:
        enter_trajectory(context.events, context.identity.number)
    agent = make_agent(loop)
    try:
        if context.services.tools.opens_first:
            await context.open_first()
        await agent.run(context)
    except LimitExceeded as error:
        context.end(error.outcome, error.reason, limit_source=error.source)
    await context.score()


def _name_of(loop: Registered) -> str:
    kind = class_of(loop)
    name = getattr(loop, "__name__", "") if kind is AgentLoop else kind.__name__
    return f"agent {name or type(loop).__name__}"


def _failed(context: AgentContext, error: BaseException) -> Cause | None:
    """Settle the outcome of an agent that raised; the root cause, where that is not known yet."""
    leaf = unwrap_group(error) if isinstance(error, BaseExceptionGroup) else error
    if isinstance(leaf, LimitExceeded):
        context.end(leaf.outcome, leaf.reason, limit_source=leaf.source)
        return None
    if context.ending is not None or isinstance(leaf, UnresponsiveError):
        return None  # the agent's own words for a limit that had fired, or that it was given up
    if isinstance(leaf, RejectedPrompt):
        context.end(Outcome.REJECTED, leaf.reason)
    else:
        context.end(Outcome.FAILED, leaf.reason if isinstance(leaf, EngineError) else "agent")
    return Cause.of(leaf)
