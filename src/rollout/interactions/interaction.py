"""What a simulated user is, and the registry that makes one for each trajectory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rollout.errors import ConfigError
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import Message


class InteractionContext(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectory that a simulated user takes part in.

    Attributes:
        uid: The prompt's uid.
        member: Position within the group.
        kwargs: The prompt's ``extra["interaction_kwargs"]``.
        ground_truth: The prompt's reference answer.
        extra: The prompt's ``extra``.
        threads: Where sync code runs: ``await context.threads.run(name, function, *args)``; None
            outside a runtime.
    """

    uid: str
    member: int
    kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)
    ground_truth: Any = None
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    threads: WorkerThreads | None = None


class InteractionTurn(msgspec.Struct, frozen=True):
    """What a simulated user answers.

    Attributes:
        text: What the user says; the model reads it unless the conversation is done.
        is_done: The conversation ends here.
        score: Joins the trajectory's `turn_scores`; None where the user judges nothing.
        extra: Joins the trajectory's `extra`, and is that of the user's message.
    """

    text: str
    is_done: bool = False
    score: float | None = None
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)


class Interaction(ABC):
    """A simulated user in one trajectory.

    One object serves one trajectory: `start` once, `respond` after each assistant turn without
    tool calls, `finish` once at the end, whatever the outcome, shielded and within
    ``limits.cleanup_s``. Subclasses set `name` and can be constructed without arguments.
    """

    name: str

    async def start(self, context: InteractionContext) -> None:  # noqa: B027  (optional)
        """Get ready for this trajectory."""

    @abstractmethod
    async def respond(self, messages: Sequence[Message | Mapping[str, Any]]) -> InteractionTurn:
        """The user's answer to a conversation whose last message is the assistant's."""

    async def finish(self) -> None:  # noqa: B027  (optional)
        """Let go of what `start` acquired."""


class InteractionFactory(Protocol):
    """Makes a simulated user for each trajectory: an `Interaction` class, or what has a name."""

    @property
    def name(self) -> str: ...

    def __call__(self) -> Interaction: ...


class InteractionRegistry:
    """The simulated users of a runtime, by name.

    Raises:
        ConfigError: A factory has no name or cannot be called, or names collide (all are named).
    """

    def __init__(self, factories: Sequence[InteractionFactory] = ()) -> None:
        for factory in factories:
            name = getattr(factory, "name", None)
            if not (callable(factory) and isinstance(name, str) and name):
                raise ConfigError(
                    f"interaction {factory!r:.200}: expected an Interaction class or a factory, "
                    f"with a name, got {name!r}: each trajectory gets an object of its own"
                )
        counts = Counter(factory.name for factory in factories)
        collisions = [repr(name) for name, count in counts.items() if count > 1]
        if collisions:
            raise ConfigError(
                f"interactions with the same name: {', '.join(collisions)}; names must be unique"
            )
        self._factories = {factory.name: factory for factory in factories}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all interactions, in the order given."""
        return tuple(self._factories)

    def check(self, name: str) -> None:
        """Raise a ConfigError with the known names where this one is unknown."""
        if not isinstance(name, str) or name not in self._factories:
            known = ", ".join(repr(known) for known in self._factories) or "none"
            raise ConfigError(f"unknown interaction {name!r}; known: {known}")

    def create(self, name: str) -> Interaction:
        """A new simulated user for one trajectory, not yet started; raises as `check` does."""
        self.check(name)
        return self._factories[name]()
