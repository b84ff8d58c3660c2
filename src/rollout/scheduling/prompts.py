"""From the prompts of a call to the members that will run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import attrs

from rollout.agents.identity import Identity, named
from rollout.errors import PromptError
from rollout.limits import AGENT_TIMEOUT, AGENT_TIMEOUT_S, Clock, Deadline
from rollout.scheduling.recorded import MemberLog
from rollout.types import Prompt
from rollout.utf8 import is_encodable

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory
    from rollout.config import LimitsConfig


def trajectory_deadline(
    limits: LimitsConfig, prompt: Prompt, outer: Deadline | None, *, now: float | None = None
) -> Deadline:
    """That of a trajectory that starts, or continues, `now`; the prompt's own where it is less."""
    deadline = Deadline.after(limits.trajectory_s, "limits.trajectory_s", outer, now=now)
    own = prompt.extra.get(AGENT_TIMEOUT_S)
    return deadline if own is None else Deadline.after(own, AGENT_TIMEOUT, deadline, now=now)


class Cancellable(Protocol):
    """Work that can be ended."""

    def cancel(self) -> None:
        """Have it end soon."""


@attrs.define(eq=False, weakref_slot=False)
class Member:
    """One trajectory to be run, from admission to its outcome.

    Attributes:
        prompt: As its caller gave it, with or without a uid; see `named_prompt`.
        cancel_reason: Set once it has been cancelled.
        row: Its index in its call.
        scope: What ends its agent or its reward, while there is one.
        door: What ends its wait for a slot.
        over: The deadline of its call or group, where that ends it.
        clock: Its limits, once it has a slot.
        is_held: It is carried to the next call: its task waits, without a slot.
        is_finished: Whether it has its outcome.
        log: Its part of the journal; None where there is none.
        concluding_since: When its agent ended, or its trajectory began to wait for others of its
            group, on the loop's clock; None before.
        batch: Number of the call that admitted it, for events.
        began: When its first attempt did, for events; None where it has not.
    """

    prompt: Prompt
    identity: Identity
    row: int = 0
    cancel_reason: str | None = None
    scope: Cancellable | None = None
    door: Cancellable | None = None
    over: Deadline | None = None
    clock: Clock | None = None
    is_held: bool = False
    is_finished: bool = False
    log: MemberLog | None = None
    concluding_since: float | None = None
    batch: int = 0
    began: float | None = None

    @property
    def named_prompt(self) -> Prompt:
        """Its prompt, with its uid; the same object each time."""
        self.prompt = prompt = named(self.prompt, self.identity.uid)
        return prompt

    def pause(self) -> None:
        """Carry it: it makes no further request, and all of its limits stand still."""
        assert self.clock is not None
        self.is_held = True
        self.clock.carry()

    def resume(self, deadline: Deadline) -> None:
        """Let a carried one continue, with this deadline."""
        assert self.clock is not None
        self.is_held = False
        self.clock.continue_carried(deadline)

    def is_named(self, uid: str | None, member: int | None) -> bool:
        """Whether it is this member of this prompt; None stands for all."""
        return uid in (None, self.identity.uid) and member in (None, self.identity.member)

    def is_meant(self, uid: str | None, member: int | None) -> bool:
        """Whether a cancellation of this prompt and member, None for all, is still to reach it."""
        is_open = not self.is_finished and self.cancel_reason is None
        return is_open and self.is_named(uid, member)

    def give_scope(self, scope: Cancellable) -> None:
        """Have this cancelled with the member, from now on; at once where that is cancelled."""
        self.scope = scope
        if self.cancel_reason is not None or self.over is not None:
            scope.cancel()


class Ended(NamedTuple):
    """A member that has ended, its row, and its trajectory."""

    row: int
    member: Member
    trajectory: Trajectory


#: What those are told who give rows of a data set, or texts.
HOW_TO_PROMPT = (
    'write [Prompt("a question")], [Prompt(messages=row["prompt"], ground_truth=...) for row in '
    "rows], or rollout.read_prompts(path) for a file of rows"
)


def check_prompts(prompts: Sequence[Prompt]) -> list[str]:
    """The uid of each prompt.

    Raises:
        PromptError: Something is no `Prompt`, or two share a uid; nothing has been started.
    """
    if isinstance(prompts, Prompt | str | bytes) or not isinstance(prompts, Sequence):
        found = type(prompts).__name__
        raise PromptError(f"prompts: expected a sequence of Prompt, got {found}; {HOW_TO_PROMPT}")
    faults = [
        f"prompts[{index}]: expected a Prompt, got {type(prompt).__name__}"
        for index, prompt in enumerate(prompts)
        if not isinstance(prompt, Prompt)
    ]
    if faults:
        faults[-1] += f"; {HOW_TO_PROMPT}"
    faults += [
        fault
        for index, prompt in enumerate(prompts)
        if isinstance(prompt, Prompt)
        for fault in _faults_of(prompt, f"prompts[{index}]")
    ]
    if faults:
        raise PromptError("\n".join(faults))
    uids = [f"prompt-{n}" if prompt.uid is None else prompt.uid for n, prompt in enumerate(prompts)]
    _check_uids(uids)
    return uids


def check_prompt(prompt: object, path: str) -> None:
    """Let one prompt pass.

    Raises:
        PromptError: It is none, or a field of it is wrong.
    """
    if not isinstance(prompt, Prompt):
        raise PromptError(f"{path}: expected a Prompt, got {type(prompt).__name__}")
    faults = _faults_of(prompt, path)
    if faults:
        raise PromptError("\n".join(faults))


#: What each field of a prompt must be, beside None where that is its default.
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "uid": (str, type(None)),
    "agent_name": (str, type(None)),
    "data_source": (str, type(None)),
    "sampling": (Mapping,),
    "tools_kwargs": (Mapping,),
    "extra": (Mapping,),
    "tools": (list, tuple, type(None)),
    "messages": (list, tuple),
}
#: What they mostly are: a look at the type alone is several times as fast.
_USUAL_TYPES = {
    field: frozenset(dict if kind is Mapping else kind for kind in kinds)
    for field, kinds in _FIELD_TYPES.items()
}
_TEXTS = ("uid", "agent_name", "data_source")
_SPOKEN = {str: "a string", Mapping: "a mapping", list: "a list", type(None): "None"}


#: The priorities that every engine can tell apart, whichever sign it gives them.
MOST_PRIORITY = 2**31 - 1
PRIORITY = "an integer, -2**31 + 1 to 2**31 - 1"


def is_priority(value: object) -> bool:
    """Whether a prompt can have this priority."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return abs(value) <= MOST_PRIORITY


def _faults_of(prompt: Prompt, path: str) -> list[str]:
    faults = [
        f"{path}.{field} = {value!r:.80}: expected {_expected(field)}"
        for field, types in _FIELD_TYPES.items()
        if type(value := getattr(prompt, field)) not in _USUAL_TYPES[field]
        and not isinstance(value, types)
    ]
    for field in _TEXTS:
        text = getattr(prompt, field)
        if isinstance(text, str) and not is_encodable(text):
            faults.append(f"{path}.{field} = {text!r:.80}: expected a text that UTF-8 can hold")
    if not is_priority(prompt.priority):
        faults.append(f"{path}.priority = {prompt.priority!r:.80}: expected {PRIORITY}")
    if isinstance(prompt.extra, Mapping) and not _is_limit(prompt.extra.get(AGENT_TIMEOUT_S)):
        own = prompt.extra[AGENT_TIMEOUT_S]
        faults.append(f"{path}.extra[{AGENT_TIMEOUT_S!r}] = {own!r:.80}: expected a number > 0")
    if isinstance(prompt.tools, list | tuple):
        faults += [
            f"{path}.tools[{index}] = {name!r:.80}: expected a string"
            for index, name in enumerate(prompt.tools)
            if not isinstance(name, str)
        ]
    return faults


def _is_limit(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _expected(field: str) -> str:
    if field == "messages":
        return "a text or a list of messages"
    return " or ".join(_SPOKEN[kind] for kind in _FIELD_TYPES[field] if kind is not tuple)


def _check_uids(uids: list[str]) -> None:
    first: dict[str, int] = {}
    faults = []
    for index, uid in enumerate(uids):
        if uid in first:
            faults.append(
                f"prompts[{index}].uid = {uid!r}: the uid of prompts[{first[uid]}] "
                "too; uids must be unique within a call"
            )
        first.setdefault(uid, index)
    if faults:
        raise PromptError("\n".join(faults))
