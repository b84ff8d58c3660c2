"""The nouns of a rollout: prompts, messages, tool calls, trajectories.

Everything here is plain data without I/O, so that the wire, the scheduler and the trainer's edge
can share it. Token ids live in the `Transcript` of a trajectory, never in a list here.
"""

from __future__ import annotations

import enum
import traceback as traceback_module
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NewType

import msgspec

if TYPE_CHECKING:
    from rollout.chat.transcript import Transcript
else:
    # Of a floor above, and NumPy may be missing here. `help` and `inspect.signature` read the
    # annotation all the same; nothing decodes it.
    Transcript = NewType("Transcript", object)
    Transcript.__module__ = "rollout.chat.transcript"

#: A trajectory's cause keeps this many characters of traceback: enough for the frames that matter.
MAX_TRACEBACK_CHARACTERS = 2000

#: Begins the name of a trajectory's metric that says how its text compares with a full rendering.
DRIFT = "tokenization/"


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
    """One message of a conversation, in the terms of the OpenAI chat format."""

    role: str
    content: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    name: str | None = None


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What one group of trajectories starts from.

    Attributes:
        messages: The conversation so far, as `Message` objects or OpenAI-style dicts.
        uid: Names the prompt in seeds, outcomes and `cancel`; unique within a call. None takes
            ``prompt-<index>``.
        agent_name: Registered agent loop; None takes ``agent.name`` of the configuration.
        sampling: Overrides of ``sampling`` for this prompt, e.g. ``{"temperature": 0.2}``.
        tools: Names of the tools offered; None offers all.
        tools_kwargs: Per tool name, keyword arguments that reach the tool beside the model's own.
        ground_truth: The reference that a reward function compares with.
        data_source: Where the prompt came from; reward functions often branch on it.
        extra: Whatever else travels with the prompt to agents, tools and rewards.
    """

    messages: Sequence[Message | Mapping[str, Any]]
    uid: str | None = None
    agent_name: str | None = None
    sampling: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tools: Sequence[str] | None = None
    tools_kwargs: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)
    ground_truth: Any = None
    data_source: str | None = None
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)


class Outcome(enum.StrEnum):
    """How a trajectory ended. Every admitted trajectory gets exactly one."""

    COMPLETED = "completed"
    LENGTH = "length"
    LIMIT = "limit"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"


def text_of(error: BaseException) -> str:
    """What an error says; foreign ones may fail at that too."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "(its message cannot be shown)"


def said(error: BaseException) -> str:
    """Type and message of an error, for a log."""
    return f"{type(error).__name__}: {text_of(error)}"


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The root cause of a failure: what was raised, what it said, and where."""

    type: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        """The record of `error`'s root cause, with the tail of that one's traceback."""
        root, seen = error, {id(error)}
        while root.__cause__ is not None and id(root.__cause__) not in seen:  # causes may go round
            root = root.__cause__
            seen.add(id(root))
        frames = "".join(traceback_module.format_tb(root.__traceback__))
        return cls(
            type=type(root).__qualname__,
            message=text_of(root),
            traceback=frames[-MAX_TRACEBACK_CHARACTERS:],
        )


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """A reward with what the trainer may want beside its value.

    Attributes:
        value: The scalar reward.
        extra: Merged into the trajectory's `extra`, e.g. sub-scores.
    """

    value: float
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)


class Trajectory(msgspec.Struct, kw_only=True, weakref=True):
    """One finished run of an agent: its tokens, its outcome and its reward.

    Attributes:
        uid: The prompt's uid.
        group: Position of the prompt in the call; its members are adjacent rows of the batch.
        member: Position within the group, 0 … samples_per_prompt - 1.
        transcript: The exact tokens; empty where the trajectory was rejected before rendering.
        history: What the model saw of its earlier turns, `agent.history`: "append_only" is what it
            had sampled, "inference_template" what its template makes of them.
        earlier: Transcripts of earlier turns, where the template had written them anew since: each
            is a row of its own, exact for what was generated in it.
        outcome: How it ended; `reason` says why in a word, `limit_source` names the limit's path
            in the configuration where one fired, `cause` the root cause of a failure.
        trainable: Whether policy lets a trainer learn from this row, apart from the mask.
        reward: The reward function's value; None where there is none or it is unknown, never 0
            in its place.
        turn_scores: Scores given by a simulated user, one for each of its turns.
        tool_rewards: Rewards given by tools, in the order of the calls.
        num_turns: User turns + assistant turns + 1, the prompt counting as one.
        metrics: Seconds, tokens and calls of this trajectory by name; ``tools/TOOL/NAME`` sums what
            a tool measured over its calls.
        extra: What the prompt, the agent and the reward function attached.
        prompt: What it started from.
        messages: The whole conversation as the agent and its tools saw it.
    """

    uid: str
    group: int
    member: int
    transcript: Transcript
    outcome: Outcome
    reason: str = ""
    limit_source: str | None = None
    cause: Cause | None = None
    trainable: bool = True
    reward: float | None = None
    turn_scores: list[float] = msgspec.field(default_factory=list)
    tool_rewards: list[float] = msgspec.field(default_factory=list)
    num_turns: int = 1
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    prompt: Prompt | None = None
    messages: list[Message] = msgspec.field(default_factory=list)
    history: str = "append_only"
    earlier: list[Transcript] = msgspec.field(default_factory=list)

    @property
    def transcripts(self) -> list[Transcript]:
        """All of them in order, one for each row of the batch."""
        return [*self.earlier, self.transcript]

    @property
    def generated_length(self) -> int:
        """Tokens that engines returned, in all rows."""
        return sum(transcript.generated_length for transcript in self.transcripts)

    @property
    def answer(self) -> str:
        """Content of the last assistant message; empty where there is none."""
        said = (m.content or "" for m in reversed(self.messages) if m.role == "assistant")
        return next(said, "")
