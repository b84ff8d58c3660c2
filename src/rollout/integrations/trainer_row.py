"""One segment of a trajectory as arrays, of the lengths that a trainer takes.

Shapes: P prompt tokens, N response tokens, T = P + N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np
import numpy.typing as npt

from rollout.chat.trajectory import Trajectory
from rollout.chat.transcript import NO_EXPERT, NO_VERSION
from rollout.medium import PlacedMedia
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

StopReason = Literal["stop", "length", "abort"]
#: What ended the last generation of a row, in the words that trainers share.
_STOP_REASONS: Mapping[str | None, StopReason] = {
    "stop": "stop",
    "length": "length",
    "deadline": "length",
}
_CUT = (Outcome.LENGTH, Outcome.LIMIT, Outcome.DEADLINE)


@attrs.frozen(kw_only=True, eq=False)
class TrainerRow:
    """One segment, as a trainer takes it.

    Attributes:
        trajectory: What it is of: uid, member, outcome, extra and all else of it.
        segment: Which segment: an index.
        is_last: Whether it is the last row of its trajectory.
        prompt_ids: (P,) int32, P ≥ 1.
        response_ids: (N,) int32, N ≥ 1; never ends on an observation.
        sampled: (N,) bool: whether an engine sampled it.
        mask: (N,) bool: whether a trainer is to learn it: `sampled`, or False throughout.
        log_probs: (N,) float32, 0.0 where not sampled.
        weight_versions: (N,) int32, -1 where not sampled.
        token_rewards: (N,) float32; None where nobody gave any.
        routed_experts: (T, layers, top_k) int16, -1 unknown; None where no engine told any.
        reward: Its own or what the policy put in its place.
        is_rewarded: Whether it is its own.
        is_trainable: Whether a trainer may learn from it, whatever the policy makes of that.
        media: Images and videos among its tokens, with their places.
        stop_reason: "stop", "length" (cut by any limit) or "abort" (cancelled, failed, rejected).
    """

    trajectory: Trajectory
    segment: int
    is_last: bool
    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.bool_]
    mask: npt.NDArray[np.bool_]
    log_probs: npt.NDArray[np.float32]
    weight_versions: npt.NDArray[np.int32]
    token_rewards: npt.NDArray[np.float32] | None
    routed_experts: npt.NDArray[np.int16] | None
    reward: float
    is_rewarded: bool
    is_trainable: bool
    stop_reason: StopReason
    media: Sequence[PlacedMedia] = ()

    @property
    def purpose(self) -> str:
        """That of its segment."""
        return self.trajectory.segments[self.segment].purpose

    @property
    def group(self) -> Hashable:
        """Names its group: equal for the members of one prompt of one call."""
        return self.trajectory.group, self.trajectory.uid

    def masked(self) -> TrainerRow:
        """The same with mask 0."""
        return attrs.evolve(self, mask=np.zeros_like(self.mask))

    def cut(self, first: int, response: int) -> TrainerRow:
        """The same without its `first` tokens, and with at most `response` in the response.

        That ends on a sampled token, so that fewer may be left, or none.
        """
        sampled = np.flatnonzero(self.sampled[:response])
        stop = int(sampled[-1]) + 1 if len(sampled) else 0
        was_cut, whole = stop < len(self.response_ids), len(self.prompt_ids) + stop
        rewards, experts = self.token_rewards, self.routed_experts
        of_tokens = ("response_ids", "sampled", "mask", "log_probs", "weight_versions")
        return attrs.evolve(
            self,
            prompt_ids=self.prompt_ids[first:],
            token_rewards=None if rewards is None else rewards[:stop],
            routed_experts=None if experts is None else experts[first:whole],
            media=[
                PlacedMedia(each.medium, each.start - first, each.count)
                for each in self.media
                if each.start >= first and each.start + each.count <= whole
            ],
            stop_reason="length" if was_cut and self.stop_reason == "stop" else self.stop_reason,
            **{name: getattr(self, name)[:stop] for name in of_tokens},
        )

    def filled(self, eos: int) -> TrainerRow:
        """The same with one end-of-sequence token that nobody sampled as its response.

        And as its prompt, where it has none.
        """
        filling = np.array([eos], dtype=np.int32)
        prompt_ids = self.prompt_ids if len(self.prompt_ids) else filling
        rewards, experts = self.token_rewards, self.routed_experts
        if experts is not None:
            unknown = np.full((len(prompt_ids) + 1, *experts.shape[1:]), NO_EXPERT, np.int16)
            unknown[: len(experts)] = experts
            experts = unknown
        return attrs.evolve(
            self,
            prompt_ids=prompt_ids,
            response_ids=filling,
            sampled=np.zeros(1, dtype=np.bool_),
            mask=np.zeros(1, dtype=np.bool_),
            log_probs=np.zeros(1, dtype=np.float32),
            weight_versions=np.full(1, NO_VERSION, dtype=np.int32),
            token_rewards=None if rewards is None else np.zeros(1, dtype=np.float32),
            routed_experts=experts,
        )


def row_of(trajectory: Trajectory, at: int, *, is_last: bool) -> TrainerRow:
    """A segment as it is: it may be empty, and a reward that it lacks is NaN."""
    segment = trajectory.segments[at]
    transcript, rewards = segment.transcript, segment.token_rewards
    begin = transcript.prompt_length
    stop = len(transcript) - transcript.trailing_observation_length
    ids, sampled = transcript.ids(), transcript.mask()[begin:stop]
    experts, reward = transcript.routed_experts(), trajectory.reward_of(segment)
    return TrainerRow(
        trajectory=trajectory,
        segment=at,
        is_last=is_last,
        prompt_ids=ids[:begin],
        response_ids=ids[begin:stop],
        sampled=sampled,
        mask=sampled,
        log_probs=transcript.log_probs()[begin:stop],
        weight_versions=transcript.weight_versions()[begin:stop],
        token_rewards=None
        if rewards is None
        else np.array(rewards, dtype=np.float32)[: stop - begin],
        routed_experts=None if experts is None else experts[:stop],
        reward=math.nan if reward is None else reward,
        is_rewarded=reward is not None,
        is_trainable=trajectory.is_trainable(segment),
        stop_reason=_stop_reason(trajectory, at),
        media=[each for each in transcript.media if each.start + each.count <= stop],
    )


def _stop_reason(trajectory: Trajectory, at: int) -> StopReason:
    """Why a row ends: that of its last generation; where the trajectory ends, that one's."""
    if at == trajectory.main_index and trajectory.outcome is not Outcome.COMPLETED:
        return "length" if trajectory.outcome in _CUT else "abort"
    ends = [span.finish_reason for span in trajectory.segments[at].transcript.generated_spans()]
    return _STOP_REASONS.get(ends[-1] if ends else None, "abort")
