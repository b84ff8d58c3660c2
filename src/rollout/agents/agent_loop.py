"""What an agent loop is, and the names under which prompts find them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeVar

from rollout.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.agents.context import AgentContext


class AgentLoop(ABC):
    """One trajectory's program: subclass it, write `run`, and register it under a name.

    Of a class that is registered, an instance serves exactly one trajectory, so its attributes are
    that trajectory's own. An instance that is registered serves all of them.

    Attributes:
        needs_gateway: Whether it works through `AgentContext.door`: `open_rollout` then fails where
            the gateway cannot be opened, and not the first trajectory.
    """

    __slots__ = ()

    needs_gateway: ClassVar[bool] = False

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


#: A class, of which each trajectory gets an instance, or an instance for all.
Loop = TypeVar("Loop", bound="type[AgentLoop] | AgentLoop")
_registry: dict[str, type[AgentLoop] | AgentLoop] = {}


def register_agent(name: str) -> Callable[[Loop], Loop]:
    """Decorator of a class, or of an instance: prompts with ``agent_name=name`` run this loop.

    Raises:
        AgentError: Another one has the name, or it is no `AgentLoop`.
    """

    def register(loop: Loop) -> Loop:
        is_class = isinstance(loop, type) and issubclass(loop, AgentLoop)
        if not (is_class or isinstance(loop, AgentLoop)):
            raise AgentError(f"register_agent({name!r}): {loop!r} is not a subclass of AgentLoop")
        taken = _registry.setdefault(name, loop)
        # A reloaded module (a notebook's cell run again) may replace its own class.
        if _home(taken) != _home(loop):
            raise AgentError(f"register_agent({name!r}): the name is taken by {_home(taken)}")
        _registry[name] = loop
        return loop

    return register


def _home(loop: type[AgentLoop] | AgentLoop) -> str:
    """Where a loop was written."""
    kind = loop if isinstance(loop, type) else type(loop)
    return f"{kind.__module__}.{kind.__qualname__}"


def agent_names() -> tuple[str, ...]:
    """Every registered name, sorted."""
    return tuple(sorted(_registry))


def registered_agents() -> dict[str, type[AgentLoop] | AgentLoop]:
    """The loops that are registered now, by their names."""
    return dict(_registry)


def get_agent(name: str) -> type[AgentLoop] | AgentLoop:
    """The loop registered under `name`: a class, or an instance that serves all trajectories.

    Raises:
        AgentError: There is none; the message lists the known ones.
    """
    try:
        return _registry[name]
    except KeyError:
        known = ", ".join(agent_names())
        raise AgentError(f"no agent is registered as {name!r}; known: {known}") from None
