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

    An instance serves exactly one trajectory, so its attributes are that trajectory's own.

    Attributes:
        needs_gateway: Whether it works through `AgentContext.door`: `open_rollout` then fails where
            the gateway cannot be opened, and not the first trajectory.
    """

    needs_gateway: ClassVar[bool] = False

    @abstractmethod
    async def run(self, context: AgentContext) -> None:
        """Drive the trajectory to its end; what it appends through `context` is the result.

        Returning ends the trajectory as `completed` (as `length` where the last generation was
        cut). An exception ends it as `failed` and harms no other. Deadlines and cancellation
        arrive as the running backend's cancellation: clean up and let it pass.
        """


_registry: dict[str, type[AgentLoop]] = {}
Loop = TypeVar("Loop", bound=type[AgentLoop])


def register_agent(name: str) -> Callable[[Loop], Loop]:
    """Class decorator: prompts with ``agent_name=name`` run this loop.

    Raises:
        AgentError: Another class has the name, or the class is no `AgentLoop`.
    """

    def register(loop: Loop) -> Loop:
        if not (isinstance(loop, type) and issubclass(loop, AgentLoop)):
            raise AgentError(f"register_agent({name!r}): {loop!r} is not a subclass of AgentLoop")
        taken = _registry.setdefault(name, loop)
        # A reloaded module (a notebook's cell run again) may replace its own class.
        same = (taken.__module__, taken.__qualname__) == (loop.__module__, loop.__qualname__)
        if not same:
            raise AgentError(
                f"register_agent({name!r}): the name is taken by "
                f"{taken.__module__}.{taken.__qualname__}"
            )
        _registry[name] = loop
        return loop

    return register


def agent_names() -> tuple[str, ...]:
    """Every registered name, sorted."""
    return tuple(sorted(_registry))


def get_agent(name: str) -> type[AgentLoop]:
    """The loop registered under `name`.

    Raises:
        AgentError: There is none; the message lists the known ones.
    """
    try:
        return _registry[name]
    except KeyError:
        known = ", ".join(agent_names())
        raise AgentError(f"no agent is registered as {name!r}; known: {known}") from None
