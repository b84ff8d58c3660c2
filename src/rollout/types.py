"""The nouns of a rollout: prompts, messages, tool calls, outcomes.

Everything here is plain data without I/O, so that the wire, the scheduler and the trainer's edge
can share it. Token ids live in the `Transcript` of a trajectory, never in a list here.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.medium import Media
from rollout.wait_places import format_user_frames, get_cause

#: A trajectory's cause keeps this many characters of traceback: enough for the frames that matter.
MAX_TRACEBACK_CHARACTERS = 2000

#: Begins the name of a trajectory's metric that says how its text compares with a full rendering.
DRIFT = "tokenization/"
#: As which tool calls are counted that were in no format, and those of tools that there are not.
NOT_PARSED, UNKNOWN_TOOL = "(not parsed)", "(unknown)"

_ATOMS = frozenset((str, int, float, bool, bytes))


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call that the model asked for, parsed from its text."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    raw: str = ""


class InvalidToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """Text in the place of a tool call that cannot be parsed as one, and why."""

    raw: str
    reason: str


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation, in the terms of the OpenAI chat format.

    Attributes:
        content: Its text. Where it is given as a list of parts, among them images and videos, what
            the conversation keeps of it is their text, and `parts`.
        extra: What it carries for agents, rewards and records; the model never sees it.
        fields: Further keys that its chat template reads, e.g. ``reasoning_content``.
        parts: Of a message with images or videos, what it says and shows, in order; else empty.
    """

    role: str
    content: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    name: str | None = None
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    fields: Mapping[str, Any] = msgspec.field(default_factory=dict)
    parts: Sequence[str | Media] = ()


class _PositionalMessages(msgspec.Struct, frozen=True):
    """The field of a `Prompt` that needs no name."""

    messages: Sequence[Message | Mapping[str, Any]]


class Prompt(_PositionalMessages, frozen=True, kw_only=True):
    """What one group of trajectories starts from.

    The members of a group share it, and those of another attempt: agents must not change what it
    holds, and keep what is their own in ``context.extra``.

    Keys of mappings that hold None are dropped from `messages`, `sampling` and `tools_kwargs`, at
    every depth: Arrow gives each mapping of a column the keys of all. Calls with a `raw` text,
    which a model sampled, keep theirs, and so do `ground_truth` and every `extra`.

    Attributes:
        messages: The conversation so far, as `Message` objects or OpenAI-style dicts; a text, as
            in ``Prompt("What is 17 + 25?")``, is what a user says. The one field without a name.
        uid: Names the prompt in seeds, outcomes and `cancel`; unique within a call. None takes
            ``prompt-<index>``.
        agent_name: Registered agent loop; None takes ``agent.name`` of the configuration.
        sampling: Overrides of ``sampling`` for this prompt, e.g. ``{"temperature": 0.2}``.
        tools: Names of the tools offered; None offers all.
        tools_kwargs: Per tool name, keyword arguments that reach the tool beside the model's own.
        ground_truth: The reference that a reward function compares with.
        data_source: Where the prompt came from; reward functions often branch on it.
        priority: Larger is served first: at admission, where requests wait for an engine, and in
            the engines' own queues. -2**31 + 1 … 2**31 - 1.
        extra: Whatever else travels with the prompt to agents, tools and rewards.
    """

    uid: str | None = None
    agent_name: str | None = None
    sampling: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tools: Sequence[str] | None = None
    tools_kwargs: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)
    ground_truth: Any = None
    data_source: str | None = None
    priority: int = 0
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)

    if TYPE_CHECKING:  # the messages may be given as a text, and are never read as one

        def __init__(
            self,
            messages: str | Sequence[Message | Mapping[str, Any]],
            *,
            uid: str | None = None,
            agent_name: str | None = None,
            sampling: Mapping[str, Any] = ...,
            tools: Sequence[str] | None = None,
            tools_kwargs: Mapping[str, Mapping[str, Any]] = ...,
            ground_truth: Any = None,
            data_source: str | None = None,
            priority: int = 0,
            extra: Mapping[str, Any] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        given: object = self.messages
        if isinstance(given, str):
            given = [Message(role="user", content=given)]
            msgspec.structs.force_setattr(self, "messages", given)
        with suppress(RecursionError):  # what refers to itself is refused where it is used
            msgspec.structs.force_setattr(self, "messages", without_padding(given))
            for field in ("sampling", "tools_kwargs"):
                msgspec.structs.force_setattr(self, field, without_null_keys(getattr(self, field)))


def without_null_keys(value: Any) -> Any:
    """A copy of `value` without the keys of mappings that hold None, at every depth.

    Items of lists stay, whatever they are. Mappings become dicts; arrays of objects, which data
    sets have in place of lists, become lists. Other objects are not copied.
    """
    if type(value) in _ATOMS:  # most are: asking whether they are mappings would take twice as long
        return value
    if isinstance(value, Mapping):
        return {key: without_null_keys(item) for key, item in value.items() if item is not None}
    if type(value) in (list, tuple):
        return type(value)(map(without_null_keys, value))
    if isinstance(value, ToolCall) and not value.raw:
        return msgspec.structs.replace(value, arguments=without_null_keys(value.arguments))
    if getattr(getattr(value, "dtype", None), "kind", None) == "O":
        return without_null_keys(value.tolist())
    return value


def without_padding(messages: Any) -> Any:
    """Messages without null keys, as `Prompt` says."""
    if type(messages) not in (list, tuple):
        return messages
    return type(messages)(map(_drop_from_message, messages))


def _drop_from_message(message: Any) -> Any:
    """`message` without null keys, except in its `extra`."""
    if isinstance(message, Message):
        calls, fields = without_null_keys(message.tool_calls), without_null_keys(message.fields)
        return msgspec.structs.replace(message, tool_calls=calls, fields=fields)
    dropped = without_null_keys(message)
    if isinstance(message, Mapping) and "extra" in dropped:
        dropped["extra"] = message["extra"]
    return dropped


class Outcome(enum.StrEnum):
    """How a trajectory ended. Every admitted trajectory gets exactly one."""

    COMPLETED = "completed"
    LENGTH = "length"
    LIMIT = "limit"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"


def read_message(error: BaseException) -> str:
    """What an error says; foreign ones may fail at that too."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "(its message cannot be shown)"


def format_error(error: BaseException) -> str:
    """Type and message of an error, for a log."""
    return f"{type(error).__name__}: {read_message(error)}"


#: Of asyncio and trio, neither of which is imported for its name alone.
CANCELLATIONS = frozenset(("CancelledError", "Cancelled"))


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The root cause of a failure: what was raised, what it said, and where.

    Halves of characters, which UTF-8 cannot carry, are written as Python's escapes.
    """

    type: str
    message: str
    traceback: str = ""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            text: str = getattr(self, field).encode("utf-8", "backslashreplace").decode()
            msgspec.structs.force_setattr(self, field, text)

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        """The record of `error`'s root cause, with the tail of that one's traceback.

        That begins in the user's code, where it went through it, and leaves out event loops.

        A cancellation is how a time-out reaches the code, and no cause of it; and what says nothing
        explains nothing.
        """
        root, cause, seen = error, error, {id(error)}
        while (cause := get_cause(cause)) is not None and id(cause) not in seen:  # it may go round
            if type(cause).__name__ not in CANCELLATIONS and read_message(cause):
                root = cause
            seen.add(id(cause))
        frames = format_user_frames(root)
        while len(frames) > 1 and sum(map(len, frames)) > MAX_TRACEBACK_CHARACTERS:
            del frames[0]
        return cls(
            type=type(root).__qualname__,
            message=read_message(root),
            traceback="".join(frames)[-MAX_TRACEBACK_CHARACTERS:],
        )


def name_prompt(prompt: Prompt, uid: str) -> Prompt:
    """A prompt with its uid, which the caller may have left out; all else is shared."""
    if prompt.uid is None:
        prompt = copy.copy(prompt)  # `replace` would drop null keys, that is copy messages, again
        msgspec.structs.force_setattr(prompt, "uid", uid)
    return prompt


class _PositionalValue(msgspec.Struct, frozen=True):
    """The field of a `Reward` that needs no name."""

    value: float


class Reward(_PositionalValue, frozen=True, kw_only=True):
    """A reward with what the trainer may want beside its value.

    Attributes:
        value: The scalar reward; ``Reward(1.0)`` needs no name for it.
        extra: Merged into the trajectory's `extra`, e.g. sub-scores.
        token_values: A reward for each token after the prompt of `trajectory.transcript`
            (`Transcript.response_length` of them); or, by the index of a segment, for each token
            after the prompt of that segment. They become ``token_rewards``.
        turn_values: A reward for each turn of `trajectory.transcript`, that is for each of its
            `generated_spans`; or, by the index of a segment, for each turn of that segment. They
            stand in ``token_rewards`` on the last token of their turn, 0.0 on all others; that of
            a turn without tokens stands nowhere. Of a segment either these or `token_values`.
        segment_values: Rewards of segments by their index, in the place of `value`.
    """

    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    token_values: Sequence[float] | Mapping[int, Sequence[float]] | None = None
    turn_values: Sequence[float] | Mapping[int, Sequence[float]] | None = None
    segment_values: Mapping[int, float] = msgspec.field(default_factory=dict)
