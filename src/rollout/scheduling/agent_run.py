"""One attempt at a trajectory: its agent, in a task of its own."""

from __future__ import annotations

from types import CoroutineType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from rollout.agents.agent_loop import AgentLoop, class_of, make_agent
from rollout.agents.identity import RejectedPrompt
from rollout.drives import UnresponsiveError
from rollout.errors import EngineError, LimitExceeded
from rollout.observe.user_spans import enter_trajectory
from rollout.scopes import leaf_of, passing_of
from rollout.supervised import Supervised, Supervisor, is_given_up
from rollout.types import Cause, Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from rollout.agents.agent_loop import Registered
    from rollout.agents.context import AgentContext
    from rollout.chat.trajectory import Trajectory
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


class AgentRun(Supervised[Cause]):
    """One attempt at a member's trajectory.

    While the agent runs there is nothing else of the trajectory: no task that waits for it, and
    nothing of what is only needed once it has ended.

    Args:
        conclude: Called with it, in no task, when the agent and its clean-up have ended or were
            given up.

    Attributes:
        member: Whose trajectory it is.
        home: Gets the trajectory.
        batch_deadline: That of the call.
        started: When the first attempt began, on the loop's clock.
        before: The attempts before this one.
        deadline_left: The trajectory's, where an attempt before has put it off; else None.
        stuck: Clean-up that was given up.
    """

    __slots__ = (
        "_conclude",
        "_context",
        "batch_deadline",
        "before",
        "deadline_left",
        "home",
        "member",
        "started",
        "stuck",
    )

    def __init__(
        self,
        supervision: Supervisor,
        member: Member,
        home: MemberHome,
        batch_deadline: Deadline,
        conclude: Callable[[AgentRun], None],
    ) -> None:
        super().__init__(supervision, "an agent")
        self._conclude = conclude
        self._context: AgentContext | None = None
        self.member, self.home = member, home
        self.batch_deadline = batch_deadline
        self.started = supervision.clock()
        self.before = _NONE_BEFORE
        self.deadline_left: Deadline | None = None
        self.stuck: tuple[UnresponsiveError, ...] = ()

    @property
    def attempt(self) -> int:
        """Its number, from 1."""
        return self.before.attempts + 1

    @property
    def supervision(self) -> Supervisor:
        """That of its call."""
        return self._supervision

    @property
    def context(self) -> AgentContext:
        """The agent's."""
        assert self._context is not None
        return self._context

    @property
    def rejection(self) -> RejectedPrompt | None:
        """Why there is no agent."""
        error = self._error if self._context is None else None
        return error if isinstance(error, RejectedPrompt) else None

    @property
    def tokens(self) -> int:
        """Sampled in this attempt, in generations that have ended."""
        rows = [row for each in self.context.main.all() for row in each.rows]
        return sum(row.transcript.generated_length for row in rows)

    def reject(self, why: RejectedPrompt) -> None:
        """There is no agent."""
        self._error = why
        self._conclude(self)

    def begin(self, loop: Registered, context: AgentContext) -> None:
        """Run the agent; cancelling the member ends it."""
        self._context, self.what = context, _name_of(loop)
        self.member.concluding_since = None
        context.deadline.govern(self)
        self.member.give_scope(self)
        self.start(cast("Any", _Beginning(self, loop)))

    def go_on(self, code: Coroutine[Any, Any, None]) -> None:
        """This is the agent's code."""
        assert self._main is not None
        self._main.become(code)

    @property
    def activity(self) -> object:
        """Which trajectory it is."""
        return None if self._context is None else self._context.identity

    def __enter__(self) -> None:
        if not self._is_within:
            super().__enter__()

    def following(self, how: BaseException) -> Coroutine[Any, Any, Cause | None] | None:
        """After the agent, what ends its trajectory and leaves the block."""
        return _end_guarded(self, how) if self._is_within else None

    def closed(self) -> None:
        """Leave the block that the agent was in."""
        if self._is_within:
            self.__exit__(None, None, None)

    def again(self, calls: Mapping[str, float]) -> AgentRun:
        """Another attempt, from the start; what this one sampled is discarded.

        Args:
            calls: What there is to say of the calls so far.
        """
        context, before = self.context, self.before
        run = AgentRun(
            self._supervision, self.member, self.home, self.batch_deadline, self._conclude
        )
        run.started, run.deadline_left = self.started, context.deadline.now
        run.before = Before(
            self.attempt,
            before.discarded + context.discarded_tokens + self.tokens,
            before.resumes + context.resumes,
            (*before.restarts, *context.restarts),
            calls,
        )
        return run

    def ended(self) -> None:
        """Conclude it; what was given up has left its tools open."""
        self.member.scope = None
        self.member.concluding_since = self._supervision.clock()
        if self.unresponsive is None:
            self._conclude(self)
        else:
            _CleanUp(self).start(self.context.close())

    def cleaned_up(self, error: BaseException | None) -> None:
        """The clean-up after an agent that was given up has ended, or had to be given up too."""
        if isinstance(error, UnresponsiveError):
            self.stuck = (*self.stuck, error)
            _CleanUp(self).start(self.context.close())
        else:
            self._error = self._error or error
            self._conclude(self)

    @property
    def sandbox(self) -> TrajectorySandbox | None:
        """That of this attempt, where it has used one; it is to be closed."""
        sandbox = None if self._context is None else self._context.sandbox_asked_for
        return sandbox if sandbox is not None and sandbox.was_used else None

    def forget(self) -> None:
        """It is concluded: its context, whose deadline refers to it, is not needed any more."""
        self._context = self._error = None


class _CleanUp(Supervised[None]):
    """Closes what is still open after code was given up, and its task with it."""

    __slots__ = ("_run",)

    def __init__(self, run: AgentRun) -> None:
        super().__init__(run.supervision, "clean-up of the trajectory")
        self._run = run

    def ended(self) -> None:
        """Tell the attempt."""
        self._run.cleaned_up(self.unresponsive or self._error)


def _name_of(loop: Registered) -> str:
    kind = class_of(loop)
    name = getattr(loop, "__name__", "") if kind is AgentLoop else kind.__name__
    return f"agent {name or type(loop).__name__}"


class _Beginning:
    """Makes the agent's code at the first step of its task, within the attempt's block.

    That is left by `_end_guarded`. A coroutine around the agent's would be one for each trajectory.
    """

    __slots__ = ("_loop", "_run")

    def __init__(self, run: AgentRun, loop: Registered) -> None:
        self._run, self._loop = run, loop

    def send(self, value: None) -> Any:
        """Begin, up to where the agent waits first."""
        run, loop, context = self._run, self._loop, self._run.context
        run.__enter__()
        if context.events.is_on:
            enter_trajectory(context.events, context.identity.number)
        try:
            agent = make_agent(loop)
            if context.services.tools.opens_first:
                code: Any = _run_opened(agent, context)
            else:
                code = agent.run(context)
        except StopIteration as error:
            raise RuntimeError("the agent raised StopIteration") from error
        if not isinstance(code, CoroutineType):
            code = _awaited(code)
        run.go_on(code)
        return code.send(None)

    def throw(self, *error: Any) -> Any:
        """Nothing has begun."""
        raise error[0]

    def close(self) -> None:
        """The same."""


async def _run_opened(agent: AgentLoop, context: AgentContext) -> None:
    await context.open_first()
    await agent.run(context)


async def _awaited(code: Awaitable[None]) -> None:
    await code


async def _end_guarded(run: AgentRun, how: BaseException) -> Cause | None:
    """What the agent has raised settles the outcome, and its root cause is returned."""
    context = run.context
    try:
        with run:  # which the agent's code was begun in
            try:
                try:
                    if not isinstance(how, StopIteration):
                        raise how
                except LimitExceeded as error:
                    context.end(error.outcome, error.reason, limit_source=error.source)
                finally:
                    del how  # its traceback holds this frame, and only the collector would end that
                await context.score()
            except BaseException as error:
                _let_pass(error)
                return _failed(context, error)
    finally:
        if not is_given_up():
            await context.close()
    return None


def _let_pass(error: BaseException) -> None:
    """Raise what of an agent's error is not its own, if anything."""
    passing = error if is_given_up() else passing_of(error)
    try:
        if passing is error:
            raise error
        if passing is not None:
            raise passing from None
    finally:
        # Its traceback holds this frame, and only the collector would end that.
        del error, passing


def _failed(context: AgentContext, error: BaseException) -> Cause | None:
    """Settle the outcome of an agent that raised; the root cause, where that is not known yet."""
    leaf = leaf_of(error) if isinstance(error, BaseExceptionGroup) else error
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
