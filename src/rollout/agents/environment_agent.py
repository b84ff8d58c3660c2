"""Gym-style environments as agents: the model acts, the environment answers and rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rollout.agents.agent_loop import AgentLoop
from rollout.agents.tool_agent import has_reached_turn_limit
from rollout.chat.reward_values import finite_number
from rollout.containment import contain
from rollout.errors import AgentError
from rollout.seeds import derive_seed
from rollout.types import Message

if TYPE_CHECKING:
    from rollout.agents.context import AgentContext
    from rollout.agents.turn import AssistantTurn

Messages = list[Message | Mapping[str, Any]]
#: Parameters that the prompt cannot be passed to, which comes without a name.
_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
_STEP = "expected (observation, reward, done, info), or gymnasium's five values"


class EnvironmentAgent(AgentLoop):
    """Plays an environment to its end, the model's words being the actions.

    The environment has, sync (in a worker thread) or async:

    - ``reset(prompt) -> observation``, or gymnasium's ``reset(*, seed, options)``, which gets a
      seed that the members of a group share, and ``(observation, info)``: begins an episode;
      the observation is said after the prompt's messages, in an opened segment after those that it
      was opened with. A tuple of two with a mapping or None as its second is ``(observation,
      info)``, unless both are messages, that is `Message` objects or mappings with a ``role``.
    - ``step(action) -> (observation, reward, done, info)``, or gymnasium's five values
      ``(observation, reward, terminated, truncated, info)``, of which either ends the episode: the
      action is the text of the model's turn; see `read_action`.
    - ``close()``, where it has one: called once at the end, whatever that is.

    Async methods of an environment whose attribute `backend` is "asyncio" run there on trio too.

    An observation is a text, which a user says, a message, a list of messages, or None. The
    rewards of the steps are the trajectory's `turn_scores`, stand at the last tokens of their turns
    in its token rewards, and their sum is its reward where `open_rollout` has no reward function;
    what `info` has joins its `extra`. A turn that was cut ends the episode.

    Register an instance, ``register_agent("maze")(EnvironmentAgent(Maze))``, or the class of a
    subclass that has `reset` and `step` itself.

    Args:
        environment: Makes one environment for each trajectory, such as its class; None: this
            object is the environment.

    Raises:
        AgentError: It makes none.
    """

    is_shared = True
    _make: Callable[[], Any] | None = None  # also of subclasses that do not call `__init__`

    def __init__(self, environment: Callable[[], Any] | None = None) -> None:
        is_one = not (isinstance(environment, type) or _find_missing(environment))
        if environment is not None and (is_one or not callable(environment)):
            raise AgentError(
                f"EnvironmentAgent: environment = {environment!r:.80}; expected what makes one for "
                "each trajectory: register the class"
            )
        if environment is None:
            _check(self)
            self.is_shared = False
        self._make = environment

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if hasattr(cls, "action_of"):  # else its override would be ignored
            raise AgentError(f"{cls.__qualname__}: action_of is named read_action now")

    def read_action(self, turn: AssistantTurn) -> Any:
        """What `step` gets of a turn: its text, without reasoning. Override it for another."""
        return turn.content

    async def run(self, context: AgentContext) -> None:
        """Play one episode."""
        environment: Any = self
        if (make := self._make) is not None:
            is_async = inspect.iscoroutinefunction(getattr(make, "step", None))
            run, what = context.services.threads.run, getattr(make, "__qualname__", "environment")
            environment = make() if is_async else await run(what, make)
        _check(environment)
        try:
            await self._play(environment, context)
        finally:
            if callable(getattr(environment, "close", None)):
                act = partial(_call, context, environment, "close")
                await context.state.clean_up(f"close of {type(environment).__name__}", act)

    async def _play(self, environment: Any, context: AgentContext) -> None:
        observation, info = _read_reset(await _reset(environment, context))
        context.extra.update(info)
        before = context.messages if context.transcript else context.prompt.messages
        await context.begin([*before, *_make_messages(observation, "reset")])
        scores: list[float] = []
        context.reward = 0.0
        while True:
            turn = await context.generate()
            if turn.cut_by is not None:
                return
            with context.answering():
                act = partial(_call, context, environment, "step", self.read_action(turn))
                stepped = await contain(f"step of {type(environment).__name__}", act)
            observation, score, is_done, info = _read_step(stepped)
            scores.append(score)
            context.turn_scores.append(score)
            context.reward_turn(score)
            context.reward = sum(scores)
            context.extra.update(info)
            if is_done or has_reached_turn_limit(context):
                return
            said = _make_messages(observation, "step")
            await context.answer(said or [Message(role="user", content="")])


async def _reset(environment: Any, context: AgentContext) -> Any:
    """Call `reset` with the prompt, or with a seed where it is written as gymnasium's."""
    try:
        parameters = iter(inspect.signature(environment.reset).parameters.values())
    except (TypeError, ValueError):  # it has no signature to look at
        parameters = iter(())
    first = next(parameters, None)
    if first is not None and (first.name == "seed" or first.kind in _BY_NAME):
        identity = context.identity
        seed = derive_seed(identity.run_seed, identity.step, identity.uid) >> 32
        return await _call(context, environment, "reset", seed=seed)
    return await _call(context, environment, "reset", context.prompt)


async def _call(
    context: AgentContext, environment: Any, name: str, *args: Any, **options: Any
) -> Any:
    what = f"{name} of {type(environment).__name__}"
    backend = getattr(environment, "backend", "native")
    method = partial(getattr(environment, name), *args, **options)
    return await context.services.threads.call(what, method, backend=backend)


def _find_missing(environment: Any) -> str:
    """The methods that it lacks; empty where it is an environment."""
    names = ("reset", "step")
    return " and no ".join(each for each in names if not callable(getattr(environment, each, None)))


def _check(environment: Any) -> None:
    missing, name = _find_missing(environment), type(environment).__name__
    if missing:
        raise AgentError(f"the environment {name} has no method {missing}")


def _read_reset(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """The observation that a reset returned, and the info beside it."""
    if isinstance(value, tuple) and len(value) == 2:
        observation, info = value
        are_messages = all(
            isinstance(each, Message) or (isinstance(each, Mapping) and "role" in each)
            for each in value
        )
        if isinstance(info, Mapping | None) and not are_messages:
            return observation, info or {}
    return value, {}


def _read_step(value: Any) -> tuple[Any, float, bool, Mapping[str, Any]]:
    """What a step returned, once it is known to be right.

    Raises:
        AgentError: It is not.
        BadRewardError: The reward is no finite number.
    """
    if not isinstance(value, tuple) or len(value) not in (4, 5):
        raise AgentError(f"step of the environment returned {value!r:.80}; {_STEP}")
    observation, reward, *ends, info = value
    if not isinstance(info, Mapping | None):
        raise AgentError(f"step of the environment returned the info {info!r:.80}; {_STEP}")
    is_done = any(map(bool, ends))
    return observation, finite_number(reward, "step of the environment"), is_done, info or {}


def _make_messages(observation: Any, where: str) -> Messages:
    if observation is None:
        return []
    if isinstance(observation, str):
        return [Message(role="user", content=observation)]
    if isinstance(observation, Message | Mapping):
        return [observation]
    if isinstance(observation, Sequence) and all(
        isinstance(each, Message | Mapping) for each in observation
    ):
        return list(observation)
    raise AgentError(
        f"{where} of the environment returned the observation {observation!r:.80}; expected a "
        "text, a message, a list of messages or None, and from reset also (observation, info)"
    )
