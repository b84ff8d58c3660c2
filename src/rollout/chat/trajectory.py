"""One finished run of an agent, with its tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.chat.transcript import Transcript
from rollout.types import Cause, Message, Outcome, Prompt


class Trajectory(msgspec.Struct, kw_only=True, weakref=True):
    """One finished run of an agent: its tokens, its outcome and its reward.

    Attributes:
        uid: The prompt's uid.
        group: Position of the prompt in the call; its members are adjacent rows of the batch.
        member: Position within the group, 0 … samples_per_prompt - 1.
        transcript: The exact tokens; empty where the trajectory was rejected before rendering.
        history: What the model saw of its earlier turns, `agent.history`: "append_only" is what it
            had sampled, "inference_template" what its template makes of them.
        earlier: Transcripts of earlier turns, where the template had written them differently
            since: each is a row of its own, exact for what was generated in it.
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
