"""Interaction classes written for verl, run as they are: duck-typed, verl never imported.

The protocol: ``start_interaction(instance_id, **kwargs)``, ``generate_response(instance_id,
messages, **kwargs) -> (should_terminate, response, score, data)`` and
``finalize_interaction(instance_id, **kwargs)``, all async. One object serves all trajectories.
"""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any

from rollout.chat.messages import template_messages, text_of_content
from rollout.errors import ConfigError, RolloutError
from rollout.interactions.interaction import Interaction, InteractionContext, InteractionTurn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.types import Message

_instances = itertools.count()


class VerlInteraction:
    """Makes users out of an object with verl's protocol; under trio its methods run on asyncio.

    Its methods get the prompt's ``interaction_kwargs``, and ``ground_truth`` from the prompt where
    those have none.

    Args:
        interaction: The object.
        name: What prompts and ``agent.interaction`` call it; None takes the object's own.

    Raises:
        ConfigError: It lacks `generate_response`, or has no name.
    """

    def __init__(self, interaction: Any, *, name: str | None = None) -> None:
        where = f"{type(interaction).__module__}.{type(interaction).__qualname__}"
        if not callable(getattr(interaction, "generate_response", None)):
            raise ConfigError(
                f"{where} has no method generate_response: expected verl's interaction protocol"
            )
        own: str = getattr(interaction, "name", "")
        self.name = own if name is None else name
        if not self.name:
            raise ConfigError(f"{where} has no name; give one: VerlInteraction(…, name=…)")
        self._interaction = interaction

    def __call__(self) -> Interaction:
        """A user for one trajectory."""
        return _Instance(self.name, self._interaction)


class _Instance(Interaction):
    def __init__(self, name: str, interaction: Any) -> None:
        self.name = name
        self._interaction = interaction
        self._context: InteractionContext | None = None
        self._instance_id = ""
        self._kwargs: dict[str, Any] = {}

    async def start(self, context: InteractionContext) -> None:
        self._context = context
        self._instance_id = f"{context.uid}-{context.member}-{next(_instances)}"
        self._kwargs = {"ground_truth": context.ground_truth, **context.kwargs}
        made = await self._run("start_interaction")
        self._instance_id = made if isinstance(made, str) else self._instance_id

    async def respond(self, messages: Sequence[Message | Mapping[str, Any]]) -> InteractionTurn:
        answer = await self._run("generate_response", template_messages(messages))
        if not isinstance(answer, tuple) or len(answer) != 4:
            raise RolloutError(
                f"interaction {self.name!r}: generate_response returned {answer!r:.200}; expected "
                "(should_terminate, response, score, data)"
            )
        is_done, said, score, data = answer
        text = str(said) if said is None or isinstance(said, int | float) else said
        return InteractionTurn(
            text_of_content(f"interaction {self.name!r}", text),
            is_done=bool(is_done),
            score=None if score is None else float(score),
            extra=dict(data or {}),
        )

    async def finish(self) -> None:
        if self._context is not None:
            await self._run("finalize_interaction")

    async def _run(self, name: str, *args: Any) -> Any:
        method = getattr(self._interaction, name, None)
        if method is None:
            return None
        assert self._context is not None

        async def call() -> Any:
            answer = method(
                *_taken(method, self._instance_id, *args), **_named(method, self._kwargs)
            )
            return await answer if inspect.isawaitable(answer) else answer

        threads = self._context.threads
        if threads is None:
            return await call()
        return await threads.run_asyncio(f"interaction {self.name}", call)


def _taken(method: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """As many of the positional arguments as a method has room for: verl's own classes differ."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return args
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return args[: sum(parameter.kind in kinds for parameter in parameters)]


def _named(method: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a method takes."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(kwargs)
    return {name: value for name, value in kwargs.items() if name in parameters}
