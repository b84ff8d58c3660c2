"""Which trajectory this is, and how it may end early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec

from rollout.seeds import derive_seed, session_name
from rollout.types import Message, Outcome, Prompt


class Identity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Which trajectory this is, and which conversation of it.

    Attributes:
        uid: The prompt's uid.
        group: Position of the prompt in the call.
        member: Position within the group.
        step: The trainer's step.
        run_seed: What all seeds of the run derive from.
        validate: Whether this is a validation rollout.
        path: The conversation: "" is the main one, "0" the first that was opened from it, "0.1" the
            second that was opened from that.
        number: Of the trajectory in the run's events; 0 while nobody reads them.
    """

    uid: str
    group: int
    member: int
    step: int
    run_seed: int
    validate: bool
    path: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"trajectory {self.session_id}"

    @property
    def session_id(self) -> str:
        """Names the conversation to the router and the engines; the main one, the trajectory."""
        return session_name(self.step, self.uid, self.member, self.path)

    def opened(self, number: int) -> Identity:
        """Of the conversation that is opened from this one as its `number`-th, counted from 0."""
        path = f"{self.path}.{number}" if self.path else str(number)
        return msgspec.structs.replace(self, path=path)

    def seed_of_turn(self, turn: int) -> int:
        """The seed of the conversation's generation number `turn`, the same in every run."""
        parts = (self.path, turn) if self.path else (turn,)
        return derive_seed(self.run_seed, self.step, self.uid, self.member, *parts)


def named(prompt: Prompt, uid: str) -> Prompt:
    """A prompt with its uid, which the caller may have left out.

    A trajectory that waits alone keeps the caller's: a copy is a fiftieth of what it holds.
    """
    return prompt if prompt.uid is not None else msgspec.structs.replace(prompt, uid=uid)


def continue_message(message: Any, observation: str | Sequence[Mapping[str, Any]]) -> Any:
    """Make a prompt's message whose content goes on with an observation: text, or parts."""
    is_mapping = isinstance(message, Mapping)
    if not is_mapping and not isinstance(message, Message):
        return message  # it is refused where it is rendered
    content = message.get("content") if is_mapping else message.parts or message.content
    if isinstance(observation, str) and isinstance(content, str | None):
        joined: Any = (content or "") + observation
    else:
        joined = [*_parts(content), *_parts(observation)]
    if is_mapping:
        return {**message, "content": joined}
    return msgspec.structs.replace(message, content=joined, parts=())


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str | None):
        return [{"type": "text", "text": content}] if content else []
    return [_parts(each)[0] if isinstance(each, str) else each for each in content]


@attrs.frozen(kw_only=True)
class Ending:
    """An outcome that is settled before the agent returns."""

    outcome: Outcome
    reason: str
    limit_source: str | None = None


class RejectedPrompt(Exception):
    """The prompt cannot be run: the trajectory's outcome is `rejected`, for this reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
