"""One finished run of an agent, a tree of segments; and the group of those of one prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from rollout.chat.transcript import SpanKind, Transcript
from rollout.plurals import count
from rollout.types import Cause, Message, Outcome, Prompt, ToolCall

#: Purposes of segments that this library opens. Agents may give others.
MAIN, BRANCH, SUBAGENT, COMPACTION, SIDE = "main", "branch", "subagent", "compaction", "side"

Decode = Callable[[Sequence[int]], str]
#: What printed spans are called.
MEANINGS: dict[SpanKind, str] = {
    "prompt": "prompt, not trained",
    "generated": "trained",
    "observation": "observation, not trained",
}
#: A longer prompt is shown by this many characters at either end.
PROMPT_END = 400


class Parent(NamedTuple):
    """Where a segment departs from another one of its trajectory.

    Attributes:
        segment: Index of the other one, which comes before it.
        position: Tokens that the other one had there.
    """

    segment: int
    position: int


class Segment(msgspec.Struct, kw_only=True):
    """One row of training data: a transcript, and its place in the tree of its trajectory.

    Attributes:
        transcript: The exact tokens. A branch begins with its parent's up to the position where it
            departs, with mask 0: each sampled token is trained in one row.
        parent: Where it departs from another segment; None for the first.
        purpose: "main"; "branch": continues otherwise from a place of its parent; "subagent": a
            conversation of its own; "compaction": continues where its parent ended, with a
            history that is written otherwise; "side": beside the work, such as a title; or what an
            agent calls it.
        trainable: Whether a trainer may learn from it; None: as its trajectory. Nothing of a
            trajectory that is not trainable is.
        reward: Its own; None: its trajectory's.
        token_rewards: float32, packed: one for each token after the prompt, where known.
        session_id: Under which the engines were asked.
        seeds: Of its generations, in order.
        messages: The conversation that it is part of.
    """

    transcript: Transcript
    parent: Parent | None = None
    purpose: str = MAIN
    trainable: bool | None = None
    reward: float | None = None
    token_rewards: Sequence[float] | None = None
    session_id: str = ""
    seeds: list[int] = []
    messages: Sequence[Message] = ()


class TrajectoryFacts(msgspec.Struct, kw_only=True):
    """What a `Trajectory`, its record and its rows in a batch have; records lack none of it."""

    uid: str
    group: int
    member: int
    num_turns: int
    outcome: Outcome
    reason: str
    limit_source: str | None
    trainable: bool
    reward: float | None
    turn_scores: list[float]
    tool_rewards: list[float]
    metrics: dict[str, float | int]  # whole numbers take less memory
    extra: dict[str, Any]


class Trajectory(TrajectoryFacts, kw_only=True, weakref=True):
    """One finished run of an agent: its tokens, its outcome and its reward.

    ``print(trajectory)`` shows its transcripts, which tokens are trained and which the model only
    read; where no tokenizer is at hand, as in a process of `rewards.processes`, its messages.

    Attributes:
        uid: The prompt's uid.
        group: Position of the prompt in the call; its members are adjacent rows of the batch.
        member: Position within the group, 0 … samples_per_prompt - 1.
        transcript: The exact tokens of the main segment (of its last row, where its history was
            rendered again); empty where the trajectory was rejected before rendering.
        segments: The tree of all rows, parents before their children. Of `transcript` and
            `segments` either may be left out.
        history: What the model saw of its earlier turns, `agent.history`: "append_only" is what it
            had sampled, "inference_template" what its template makes of them.
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
        prompt: What it started from; a `Prompt` for every reward, agent and caller of a runtime.
        messages: The whole conversation as the agent and its tools saw it; decoded as it is read.
    """

    num_turns: int = 1
    reason: str = ""
    limit_source: str | None = None
    trainable: bool = True
    reward: float | None = None
    turn_scores: list[float] = []
    tool_rewards: list[float] = []
    metrics: dict[str, float | int] = {}
    extra: dict[str, Any] = {}
    transcript: Transcript = None  # type: ignore[assignment]  # that of the segments
    cause: Cause | None = None
    prompt: Prompt = None  # type: ignore[assignment]  # of records without one
    messages: Sequence[Message] = []
    history: str = "append_only"
    segments: list[Segment] = []

    def __post_init__(self) -> None:
        if not self.segments:
            transcript = Transcript() if self.transcript is None else self.transcript
            self.segments = [Segment(transcript=transcript, messages=self.messages)]
        at = self.main_index
        if self.transcript is None:
            self.transcript = self.segments[at].transcript
        elif self.segments[at].transcript is not self.transcript:
            main = msgspec.structs.replace(self.segments[at], transcript=self.transcript)
            self.segments = [*self.segments[:at], main, *self.segments[at + 1 :]]
        self._check_parents()

    def __str__(self) -> str:
        return _show_trajectory(self)

    def __repr__(self) -> str:
        reward = "no reward" if self.reward is None else f"reward {self.reward:g}"
        return (
            f"<Trajectory {self.uid}/{self.member}: {self.outcome}, {reward}, "
            f"{count(len(self.segments), 'segment')}, {self.generated_length:,} tokens sampled>"
        )

    @property
    def main_index(self) -> int:
        """The index of the segment in which the main conversation ends."""
        last = 0
        for at, segment in enumerate(self.segments):
            is_next = segment.parent is not None and segment.parent[0] == last
            is_main = segment.session_id == self.segments[0].session_id
            if is_next and is_main and segment.purpose == COMPACTION:
                last = at
        return last

    @property
    def transcripts(self) -> list[Transcript]:
        """All of them in order, one for each row of the batch."""
        return [segment.transcript for segment in self.segments]

    @property
    def generated_length(self) -> int:
        """Tokens that engines returned, in all rows."""
        return sum(transcript.generated_length for transcript in self.transcripts)

    @property
    def answer(self) -> str:
        """Content of the last assistant message; empty where there is none."""
        answers = (m.content or "" for m in reversed(self.messages) if m.role == "assistant")
        return next(answers, "")

    def is_trainable(self, segment: Segment) -> bool:
        """Whether a trainer may learn from one of its segments, apart from the mask."""
        return self.trainable and segment.trainable is not False

    def reward_of(self, segment: Segment) -> float | None:
        """The reward of one of its segments; None where it is unknown."""
        return self.reward if segment.reward is None else segment.reward

    def _check_parents(self) -> None:
        for at, segment in enumerate(self.segments):
            if segment.parent is None:
                continue
            index, position = segment.parent
            if not (0 <= index < at and 0 <= position <= len(self.segments[index].transcript)):
                raise ValueError(
                    f"segments[{at}].parent = ({index}, {position}): expected the index of a "
                    "segment before it, and a position in that one's tokens"
                )


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The members of one prompt that were wanted, in member order.

    Attributes:
        uid: The prompt's.
        prompt: What they started from.
        trajectories: One for each member, whatever its outcome.
    """

    uid: str
    prompt: Prompt
    trajectories: Sequence[Trajectory]

    @property
    def min_version(self) -> int | None:
        """The oldest of the weights that sampled any of their tokens; None where none was."""
        return min(self._versions, default=None)

    @property
    def max_version(self) -> int | None:
        """The newest of them."""
        return max(self._versions, default=None)

    @property
    def _versions(self) -> set[int]:
        return set[int]().union(
            *(t.versions for each in self.trajectories for t in each.transcripts)
        )


def span_texts(transcript: Transcript, decode: Decode) -> Iterator[tuple[SpanKind, int, str]]:
    """Of each span its kind, its tokens and its text; a long prompt without its middle."""
    for span in transcript.spans:
        text = decode(transcript.span_ids(span))
        yield span.kind, len(span), _shorten(text) if span.kind == "prompt" else text


def transcript_text(transcript: Transcript, decode: Decode) -> str:
    """Every span of `transcript`, decoded from its own ids, under headings like ``[trained]``."""
    return "\n".join(
        f"[{MEANINGS[kind]}] {count(length, 'token')}\n{text}"
        for kind, length, text in span_texts(transcript, decode)
    )


def _show_trajectory(trajectory: Trajectory) -> str:
    """Its transcripts, or its messages where no tokenizer is at hand; never raises."""
    try:
        try:
            texts = _segment_texts(trajectory)
        except Exception:  # its tokenizer is not at hand, or cannot be loaded
            texts = []
        if not texts:
            messages = trajectory.messages or getattr(trajectory.prompt, "messages", ())
            texts = list(map(_message_text, messages))
        if trajectory.outcome in (Outcome.FAILED, Outcome.REJECTED):
            reason, cause = trajectory.reason, trajectory.cause
            why = f" ({reason})" if reason else ""
            why += f" {cause.type}: {cause.message}" if cause is not None else ""
            texts.append(f"[{trajectory.outcome}]{why}".rstrip())
        return "\n".join(texts or [repr(trajectory)])
    except Exception:  # what agents and tools left in it may raise anything
        return repr(trajectory)


def _segment_texts(trajectory: Trajectory) -> list[str]:
    """Those of its segments; none where there are no tokens."""
    texts, segments = list[str](), trajectory.segments
    for at, segment in enumerate(segments):
        if len(segments) > 1:
            parent = segment.parent
            start = "" if parent is None else f", from token {parent[1]} of segment {parent[0]}"
            texts.append(f"[segment {at}: {segment.purpose}{start}]")
        if segment.transcript.spans:
            decode = getattr(segment.messages, "decode", None)
            decode = decode or trajectory.messages.decode  # type: ignore[attr-defined]
            texts.append(transcript_text(segment.transcript, decode))
    return texts if any(map(len, trajectory.transcripts)) else []


def _message_text(message: Any) -> str:
    if isinstance(message, Message):
        message = msgspec.structs.asdict(message)
    content = message.get("content")
    lines = [f"[{message.get('role')}]"]
    if content is not None:
        lines.append(content if isinstance(content, str) else repr(content))
    for call in message.get("tool_calls") or ():
        called = call.get("function", call) if isinstance(call, dict) else call
        if isinstance(called, ToolCall):
            called = {"name": called.name, "arguments": called.arguments}
        lines.append(json.dumps(called, ensure_ascii=False, default=repr))
    return "\n".join(lines)


def _shorten(text: str) -> str:
    left_out = len(text) - 2 * PROMPT_END
    if left_out <= 0:
        return text
    return f"{text[:PROMPT_END]}\n… {left_out:,} characters …\n{text[-PROMPT_END:]}"
