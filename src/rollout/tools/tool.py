"""What a tool is, for the executor and whatever answers calls, and how its calls are run."""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rollout.child_processes import ChildProcesses
from rollout.config.checks import Count, Natural, Positive, Rule, validate
from rollout.errors import ToolError
from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
from rollout.types import Prompt, ToolCall
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ExceptionTypes = Annotated[
    object,
    Rule(
        "a tuple of exception types",
        lambda kinds: all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds),
    ),
]


def check_options(what: str, **options: tuple[Any, Any]) -> None:
    """Check values, each given with its rule; a `ToolError` lists all that are out of bounds."""
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
        breaker_failures, breaker_s: After so many calls in a row that raised or timed out, calls
            are answered at once with an error, for so many seconds; the next failure after that
            begins another such pause. None never refuses. Answers with `is_error` and refused
            arguments are no failures.

    A `ToolError` lists every value that is out of bounds.
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


class ToolContext(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectory that a tool is opened for.

    Attributes:
        uid: The prompt's uid.
        member: Position within the group.
        kwargs: The prompt's ``tools_kwargs`` for this tool; `create_kwargs` is the mapping of
            that name in it, where trainers put what a tool is made with.
        extra: Becomes the trajectory's `extra`; starts as the prompt's. Rewards and users see it.
        state: Shared by the tools of this trajectory, and by no other trajectory.
        threads: Where sync code runs: ``await context.threads.run(name, function, *args)``.
        prompt: What the trajectory starts from; None where the tools are used without one.
        processes: Where functions with ``isolation="process"`` run.
        sandbox: The trajectory's, which is opened when it is first used, and closed after its
            reward; the same for its agent and all its tools.
    """

    uid: str
    member: int
    threads: WorkerThreads
    prompt: Prompt | None = None
    processes: ChildProcesses | None = None
    kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    state: dict[str, Any] = msgspec.field(default_factory=dict)
    sandbox: TrajectorySandbox = msgspec.field(default_factory=TrajectorySandbox)

    @property
    def create_kwargs(self) -> Mapping[str, Any]:
        """``tools_kwargs[name]["create_kwargs"]`` of the prompt; empty where it has none."""
        kwargs = self.kwargs.get("create_kwargs")
        return kwargs if isinstance(kwargs, Mapping) else {}


class ToolSession(ABC):
    """A tool in the hands of one trajectory, from its first call to the trajectory's end.

    Attributes:
        serial: Calls to sessions that have the same object here run one after another, in the
            model's order: for a state that outlives a call, such as an interpreter. None: the
            calls of one turn are begun in that order and run at once.
        decides_reward: Whether `calc_reward` is the trajectory's reward, where neither the agent
            nor a reward function gives one. What it raises then fails the trajectory.
    """

    __slots__ = ()

    serial: object | None = None
    decides_reward: bool = False

    async def begin(self) -> str | Sequence[Mapping[str, Any]] | None:
        """Begin the trajectory of a tool that `opens_first`; called once it is open.

        Returns a text, or a list of content parts, that continues the prompt's last message; None
        for nothing. What it raises fails the trajectory.
        """
        return None

    @abstractmethod
    async def execute(self, call: ToolCall) -> Any:
        """Answer one call with anything that `normalise_result` takes.

        Calls of one turn run at the same time, but see `serial`. An exception becomes an error
        observation; at the deadline the call is cancelled, and the session stays open for later
        calls.
        """

    async def calc_reward(self) -> float | None:
        """The trajectory's reward in this tool's eyes, asked once at the end; None for none."""
        return None

    async def close(self) -> None:  # noqa: B027  (nothing to release)
        """Release what the session holds: called once, shielded, in ``limits.cleanup_s``.

        Runs in the task of `Tool.open`; sessions opened later have been closed before.
        """


class Tool(ABC):
    """A tool that models can call; one object serves all trajectories.

    Attributes:
        name: What the model calls it.
        schema: The OpenAI-style ``{"type": "function", "function": {"name", "description",
            "parameters"}}``. Calls are checked against it before they run.
        policy: How its calls are run; read when a runtime opens.
        stateful: Whether an answer depends on the calls before it in the same trajectory. A
            trajectory that is resumed from a journal gets the answers that it had, and no call runs
            twice; where a stateful tool was called it starts again.
        opens_first: Whether each trajectory that is offered it opens it before its agent begins, in
            place of at the first call: it may take as long as the trajectory then, and where it
            raises the trajectory fails.
        needs_sandbox: Whether its calls act in `ToolContext.sandbox`: a runtime that has it does
            not open where no sandbox can be had.
    """

    name: str
    schema: dict[str, Any]
    policy: ToolPolicy = ToolPolicy()
    stateful: bool = True
    opens_first: bool = False
    needs_sandbox: bool = False

    async def prepare(self) -> None:  # noqa: B027  (most tools need none)
        """Make sure that calls can be answered: once as a runtime opens, before any work.

        A `ToolError` says that they cannot; nothing is started then.
        """

    def is_offered(self, prompt: Prompt) -> bool:
        """Whether a prompt is offered it that names no tools.

        A `ToolError` where the prompt asks wrongly for it: its trajectories are rejected.
        """
        return True

    @abstractmethod
    async def open(self, context: ToolContext) -> ToolSession:
        """A session for one trajectory; opened before its first call of this tool.

        Runs within ``limits.tool_s``, in the task in which `ToolSession.close` will run too. Where
        it raises or is cancelled it leaves nothing behind.
        """


class ToolProvider(ABC):
    """Has several tools while it is open; may stand among the tools of `load_tools`."""

    @abstractmethod
    async def __aenter__(self) -> list[Tool]:
        """Its tools."""

    async def __aexit__(self, *error: object) -> None:  # noqa: B027  (most hold nothing)
        """Release what they hold."""


@asynccontextmanager
async def open_tools(tools: Sequence[Any]) -> AsyncIterator[list[Any]]:
    """The tools, with those in place of each async context manager that it gives when entered."""
    async with AsyncExitStack() as stack:
        opened: list[Any] = []
        for each in tools:
            is_one = not hasattr(each, "__aenter__")
            opened += [each] if is_one else await stack.enter_async_context(each)
        yield opened
