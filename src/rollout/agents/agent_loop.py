"""What an agent loop is, and the names under which prompts find them."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from rollout.errors import AgentError
from rollout.worker_threads import is_async

if TYPE_CHECKING:
    from rollout.agents.context import AgentContext


class AgentLoop(ABC):
    """One trajectory's program: subclass it, write `run`, and register it under a name.

    Of a class or factory that is registered, an instance serves exactly one trajectory, so its
    attributes are that trajectory's own.

    Attributes:
        needs_gateway: Whether it works through `AgentContext.gateway`: `open_rollout` then fails
            where that cannot be opened, and not the first trajectory.
        needs_sandbox: Whether it works in `AgentContext.sandbox`: the same where none can be had.
        is_shared: Whether one instance may serve all trajectories, since it keeps nothing of any:
            only then an instance can be registered. A subclass with an `__init__` of its own says
            it again.
    """

    needs_gateway: ClassVar[bool] = False
    #: Whether a member runs it again whose engine failed, or whose sandbox was lost.
    _may_run_again: ClassVar[bool] = True
    needs_sandbox: ClassVar[bool] = False
    is_shared: bool = False

    async def check(self) -> None:  # noqa: B027  (most have nothing to check)
        """Raise where this machine cannot run it; by default it can.

        `open_rollout` awaits it for an instance that is registered as `agent.name`, so that a
        missing program shows before the first trajectory.
        """

    @abstractmethod
    async def run(self, context: AgentContext) -> None:
        """Drive the trajectory to its end; what it appends through `context` is the result.

        Returning ends the trajectory as `completed` (as `length` where the last generation was
        cut). An exception ends it as `failed` and harms no other. Deadlines and cancellation
        arrive as the running backend's cancellation: clean up and let it pass.
        """


#: Makes an agent for each trajectory, such as its class, or is one that all may share.
Registered: TypeAlias = Callable[[], AgentLoop] | AgentLoop
Loop = TypeVar("Loop", bound=Registered)
_registry: dict[str, Registered] = {}


def register_agent(name: str) -> Callable[[Loop], Loop]:
    """Decorator of a class or a factory: prompts with ``agent_name=name`` run this loop.

    Each trajectory gets an agent of its own: an instance of the class, or what the factory, such as
    ``functools.partial(MyAgent, tries=3)``, returns. An instance is taken where its class says
    `AgentLoop.is_shared`; it serves all trajectories.

    Raises:
        AgentError: Another one has the name, or it is none of these.
    """

    def register(loop: Loop) -> Loop:
        fault = _find_fault(loop)
        if fault:
            raise AgentError(f"register_agent({name!r}): {fault}")
        taken = _registry.setdefault(name, loop)
        # A reloaded module (a notebook's cell run again) may replace its own class.
        if (origin := _find_origin(taken)) != _find_origin(loop):
            raise AgentError(f"register_agent({name!r}): the name is taken by {origin}")
        _registry[name] = loop
        return loop

    return register


def make_agent(registered: Registered) -> AgentLoop:
    """The agent of one trajectory.

    Raises:
        AgentError: The factory made something else.
    """
    if isinstance(registered, AgentLoop):
        return registered
    agent: object = registered()
    if not isinstance(agent, AgentLoop):
        raise AgentError(f"{_find_origin(registered)} made {agent!r:.80}; expected an AgentLoop")
    return agent


def find_class(registered: Registered) -> type[AgentLoop]:
    """The class of what is registered, as far as it is known before an agent is made."""
    if isinstance(registered, AgentLoop):
        return type(registered)
    made = _unwrap(registered)
    return made if isinstance(made, type) and issubclass(made, AgentLoop) else AgentLoop


def _find_fault(loop: Any) -> str:
    """Why something cannot be registered; empty where it can."""
    expected = "expected a subclass of AgentLoop, or a factory without arguments that makes one"
    if isinstance(loop, AgentLoop):
        if _is_shared(type(loop)) and loop.is_shared:
            return ""
        kind = type(loop).__qualname__
        return (
            f"{kind} is registered as an instance, which all trajectories would share: register "
            f"the class, {kind}, or functools.partial({kind}, ...), so that each trajectory gets "
            f"its own (a class that keeps nothing of a trajectory may say is_shared = True)"
        )
    made, what = _unwrap(loop), f"{loop!r:.200} is not a subclass of AgentLoop"
    if isinstance(made, type) and issubclass(made, AgentLoop):
        if inspect.isabstract(made) or not callable(getattr(made, "run", None)):
            return f"{made.__qualname__} has no run; expected async def run(self, context)"
    elif isinstance(made, type) or not callable(made):
        return f"{what}; {expected}"
    elif is_async(made) or inspect.isgeneratorfunction(made):
        return f"{what}, and makes none at once; {expected}"
    fault = find_call_fault(loop)
    return (
        f"{loop!r:.200} cannot be called without arguments ({fault}); {expected}" if fault else ""
    )


def find_call_fault(function: Any, *args: object) -> str:
    """Why a function cannot be called with these arguments, as far as its signature says so."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        return str(error)
    except ValueError:  # it has no signature to look at
        pass
    return ""


def _unwrap(loop: Any) -> Any:
    """What a `functools.partial` calls."""
    return loop.func if isinstance(loop, functools.partial) else loop


def _is_shared(kind: type) -> bool:
    """Whether a class says `is_shared`, for all that it and those above it keep."""
    for each in kind.__mro__:
        if "is_shared" in vars(each):
            return vars(each)["is_shared"] is True
        if "__init__" in vars(each):
            return False
    return False


def _find_origin(registered: Any) -> str:
    """Where an agent was written."""
    made = _unwrap(registered)
    kind = made if hasattr(made, "__qualname__") else type(made)
    return f"{kind.__module__}.{kind.__qualname__}"


def agent_names() -> tuple[str, ...]:
    """Every registered name, sorted."""
    return tuple(sorted(_registry))


def registered_agents() -> dict[str, Registered]:
    """What is registered now, by its names."""
    return dict(_registry)


def get_agent(name: str) -> Registered:
    """What is registered under `name`: makes agents, or is one that serves all trajectories.

    Raises:
        AgentError: There is none; the message lists the known ones.
    """
    try:
        return _registry[name]
    except KeyError:
        known = ", ".join(agent_names())
        raise AgentError(f"no agent is registered as {name!r}; known: {known}") from None
