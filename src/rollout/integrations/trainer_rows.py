"""What every trainer's adapter decides in the same way: trajectories as rows, one a segment.

A trainer has a field for less than a trajectory can be: it wants a reward of every row, at least
one token, a prompt that fits. What becomes of the others is said once, by a `RowPolicy`, counted in
the metrics of `TrainerRows` and warned of once a kind. Imports no trainer and no torch.

Shapes: of a row P prompt tokens, N response tokens, T = P + N.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rollout.errors import RolloutError
from rollout.integrations.row_policy import RowPolicy, warn_of
from rollout.integrations.trainer_row import TrainerRow, row_of
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from rollout.batch import RolloutBatch
    from rollout.chat.trajectory import Segment, Trajectory
    from rollout.config import LengthsConfig

__all__ = ["RowPolicy", "TrainerRow", "TrainerRows", "trainer_rows"]

#: The reason of a trajectory that was rejected since its prompt has too many tokens.
_TOO_LONG = ("prompt_length", "context_length")


@attrs.frozen(kw_only=True, eq=False)
class TrainerRows:
    """Rows in the order of their trajectories; of one trajectory adjacent, its main one last.

    Attributes:
        rows: One for each segment that the policy keeps.
        metrics: ``rows/total``; how many the policy decided about: ``rows/empty``,
            ``rows/unrewarded``, ``rows/over_long``, ``rows/untrainable``; ``rows/masked`` and
            ``rows/masked_tokens``, those with sampled tokens that nothing is learned from;
            ``rows/segments_left_out`` and ``rows/tokens_left_out`` (sampled ones), those without
            a row.
    """

    rows: Sequence[TrainerRow]
    metrics: dict[str, float]


def trainer_rows(
    source: RolloutBatch | Iterable[Trajectory],
    policy: RowPolicy | None = None,
    *,
    eos_token_id: int,
    lengths: LengthsConfig | None = None,
    warned: set[str] | None = None,
) -> TrainerRows:
    """A batch as rows that any trainer can take.

    Args:
        source: A batch, or trajectories; members of a group in one call, since the policy
            looks at all of them.
        policy: None takes the defaults.
        eos_token_id: Stands where a row has no tokens.
        lengths: The most prompt and response tokens that the trainer takes; None: any.
        warned: Kinds that were warned of already, to keep between calls: each is warned of once.
            None warns in every call.

    Raises:
        RolloutError: The policy says "error" of something that came up; names uid and member.
    """
    policy = policy or RowPolicy()
    given: Any = source
    trajectories: Iterable[Trajectory] = getattr(given, "trajectories", given)
    counts = Counter[str]()
    maker = _RowMaker(policy, eos_token_id, lengths, counts)
    rows = [row for each in trajectories for row in maker.rows_of(each)]
    rows = _rewarded(rows, policy, counts)
    counts["total"] = len(rows)
    masked = [int(row.sampled.sum()) for row in rows if not row.mask.any()]
    counts["masked"] = sum(map(bool, masked))
    counts["masked_tokens"] = sum(masked)
    warn_of(counts, policy, set() if warned is None else warned)
    names = ("total", "empty", "unrewarded", "over_long", "untrainable", "masked", "masked_tokens")
    left_out = ("segments_left_out", "tokens_left_out")
    return TrainerRows(
        rows=rows, metrics={f"rows/{name}": float(counts[name]) for name in (*names, *left_out)}
    )


class _RowMaker:
    """Makes rows by a policy, and counts what it decides."""

    def __init__(
        self, policy: RowPolicy, eos: int, lengths: LengthsConfig | None, counts: Counter[str]
    ) -> None:
        self._policy = policy
        self._eos = eos
        self._lengths = lengths
        self._counts = counts

    def rows_of(self, trajectory: Trajectory) -> list[TrainerRow]:
        """The rows of one trajectory, without what the rest of its group decides."""
        kept = self._kept(trajectory)
        left_out = [s for at, s in enumerate(trajectory.segments) if at not in kept]
        self._counts["segments_left_out"] += len(left_out)
        self._counts["tokens_left_out"] += sum(s.transcript.generated_length for s in left_out)
        return [self._row(trajectory, at, is_last=at == kept[-1]) for at in kept]

    def _kept(self, trajectory: Trajectory) -> list[int]:
        every = list(range(len(trajectory.segments)))
        if len(every) == 1 or self._policy.segments == "rows":
            # The main one last: SkyRL has all rows learn from the reward of the last one.
            return sorted(every, key=lambda at: at == trajectory.main_index)
        if self._policy.segments == "error":
            raise _refused(trajectory, f"has {len(every)} segments", "segments")
        if self._policy.segments == "last":
            return [trajectory.main_index]
        return [max(every, key=lambda at: _worth(trajectory, trajectory.segments[at]))]

    def _row(self, trajectory: Trajectory, at: int, *, is_last: bool) -> TrainerRow:
        row = self._fitted(row_of(trajectory, at, is_last=is_last))
        if not len(row.response_ids):
            if self._policy.empty == "error":
                raise _refused(row.trajectory, "has no response tokens", "empty")
            self._counts["empty"] += 1
            row = row.filled(self._eos)
        if not row.is_trainable:
            self._counts["untrainable"] += 1
            if self._policy.untrainable == "mask":
                row = row.masked()
        return row

    def _fitted(self, row: TrainerRow) -> TrainerRow:
        """A row that is no longer than the trainer takes."""
        prompt, response = len(row.prompt_ids), len(row.response_ids)
        most = self._lengths
        room = (prompt, response) if most is None else (most.prompt, most.response)
        is_unrun = row.trajectory.outcome is Outcome.REJECTED and row.trajectory.reason in _TOO_LONG
        if prompt <= room[0] and response <= room[1] and not is_unrun:
            return row
        if self._policy.over_long == "error":
            text = f"has {prompt} prompt and {response} response tokens, of at most {room}"
            raise _refused(row.trajectory, "was too long to run" if is_unrun else text, "over_long")
        self._counts["over_long"] += 1
        if prompt > room[0] and row.media:  # what is left of a picture's tokens has no pixels
            raise RolloutError(
                f"{row.trajectory.uid!r} member {row.trajectory.member}: its prompt of {prompt} "
                f"tokens has images or videos and cannot be cut to {room[0]}"
            )
        row = row.cut(max(0, prompt - room[0]), room[1])
        return row if self._policy.over_long == "cut" else row.masked()


def _rewarded(
    rows: Sequence[TrainerRow], policy: RowPolicy, counts: Counter[str]
) -> list[TrainerRow]:
    """Rows with a reward each."""
    means = group_means(rows)
    return [
        row if row.is_rewarded else _unrewarded(row, means.get(row.group, 0.0), policy, counts)
        for row in rows
    ]


def group_means(rows: Iterable[TrainerRow]) -> dict[Hashable, float]:
    """Of each group, the mean of its trainable rows that have a reward, where it has any."""
    own: dict[Hashable, list[float]] = {}
    for row in rows:
        if row.is_rewarded and row.is_trainable:
            own.setdefault(row.group, []).append(row.reward)
    return {group: math.fsum(rewards) / len(rewards) for group, rewards in own.items()}


def _unrewarded(
    row: TrainerRow, mean: float, policy: RowPolicy, counts: Counter[str]
) -> TrainerRow:
    if policy.unrewarded == "error":
        raise _refused(row.trajectory, "has no reward", "unrewarded")
    if policy.unrewarded == "trainer":
        return row
    counts["unrewarded"] += 1
    if policy.unrewarded == "zero":
        return attrs.evolve(row, reward=0.0)
    if policy.unrewarded == "nan":
        return row.masked()
    return attrs.evolve(row.masked(), reward=mean)


def _worth(trajectory: Trajectory, segment: Segment) -> tuple[bool, int]:
    return trajectory.is_trainable(segment), segment.transcript.generated_length


def _refused(trajectory: Trajectory, what: str, field: str) -> RolloutError:
    return RolloutError(
        f"{trajectory.uid!r} member {trajectory.member} ({trajectory.outcome}) {what}, and "
        f"RowPolicy.{field} = 'error'"
    )
