"""TRL's reward functions, given what a rollout knows and TRL does not."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.types import Message

#: Lists, one value a completion, that reward functions get beside the dataset's columns.
TRAJECTORY, REWARD, IS_TRAINED = "trajectory", "rollout_reward", "is_trained"


def rollout_reward(*, rollout_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """For ``GRPOTrainer(reward_funcs=rollout_reward)``: what the runtime's own reward said.

    None, which TRL leaves out of a group's mean, where it said nothing.
    """
    return list(rollout_reward)


def scoring_rollouts(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function of TRL's that scores what was rolled out.

    It gets conversations as messages in the place of their text, tools' answers included, and what
    is not trained is left out (None): a row without an answer of the model's says nothing.
    """
    if getattr(function, "is_scoring_rollouts", False):
        return function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (an object that is called may be async)
    ):

        async def scored_async(**given: Any) -> list[float | None]:
            return _left_out(await function(**_with_messages(given)), given)

        scored: Callable[..., Any] = scored_async
    else:

        def scored(**given: Any) -> list[float | None]:
            return _left_out(function(**_with_messages(given)), given)

    functools.update_wrapper(scored, function)
    scored.is_scoring_rollouts = True  # type: ignore[attr-defined]
    return scored


def _with_messages(given: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in given.items() if key != IS_TRAINED}
    if given["completions"] and isinstance(given["completions"][0], list):
        shown["completions"] = [completion_of(each) for each in given[TRAJECTORY]]
    return shown


def _left_out(rewards: Sequence[float | None], given: Mapping[str, Any]) -> list[float | None]:
    rewards = list(rewards)
    if len(rewards) != len(given[IS_TRAINED]):
        return rewards  # TRL says what is wrong
    return [
        reward if is_trained else None
        for reward, is_trained in zip(rewards, given[IS_TRAINED], strict=True)
    ]


def completion_of(trajectory: Trajectory) -> list[dict[str, Any]]:
    """What was said after the prompt, as messages in OpenAI's form; at least one."""
    asked = 0 if trajectory.prompt is None else len(trajectory.prompt.messages)
    said = [_message(each) for each in trajectory.messages[asked:]]
    return said or [{"role": "assistant", "content": ""}]


def _message(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.tool_calls:
        said["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.name is not None:
        said["name"] = message.name
    return said
