"""Advantages within groups, and what validation says: from a batch, or from plain tensors.

Shapes: B rows, one a segment; a trajectory has one or several. What counts is one reward for each
trajectory: of a batch `Trajectory.reward`; of plain tensors that of its first row that counts.
"Counted" are trajectories that are trainable and whose reward is known (not NaN).
"""

from __future__ import annotations

import logging
import math
import sys
from contextlib import suppress
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.batch.rollout_batch import RolloutBatch

logger = logging.getLogger("rollout")

#: Added to a standard deviation, so that nothing is divided by 0.
EPSILON = 1e-6
#: Functions that have said that a batch has no rewards.
_hinted: set[str] = set()


def group_relative(
    rewards: RolloutBatch | torch.Tensor,
    groups: torch.Tensor | None = None,
    trainable: torch.Tensor | None = None,
    *,
    trajectories: torch.Tensor | None = None,
    divide_by_std: bool = True,
    epsilon: float = EPSILON,
) -> torch.Tensor:
    """(B,) float32: by how much each trajectory did better than its group; GRPO's advantage.

    Of trajectory i, over the n counted ones of its group::

        A_i = (r_i - mean(r)) / (std(r) + epsilon)      std² = Σ (r_j - mean(r))² / (n - 1)
        A_i =  r_i - mean(r)                            with divide_by_std=False

    The first is equation 4.1.2 of DeepSeekMath (Shao et al. 2024, arXiv:2402.03300), outcome
    supervision; the second leaves the standard deviation out, which favours questions that are
    nearly always or nearly never answered ("Dr. GRPO", Liu et al. 2025, arXiv:2503.20783). Where
    n = 1 there is nothing to compare with: 0.0, as where all have one reward.

    Every segment of a trajectory gets its value; rows that are not trainable, or of unknown reward,
    get 0.0.

    Args:
        rewards: A `RolloutBatch`, which needs no further tensors; or (B,) rewards, NaN unknown.
        groups: (B,) the group of each row.
        trainable: (B,) bool; None: every row is.
        trajectories: (B,) which trajectory of its group each row is of; None: each of its own.
        divide_by_std: Whether to divide by the standard deviation.
        epsilon: Added to it, finite and ≥ 0.

    Raises:
        ValueError: The tensors are not of one length, a reward is infinite (a reward function that
            returns that has failed), `groups` is missing, or is there beside a batch; or `epsilon`
            is no such number.
    """
    added = _number("epsilon", epsilon, "a finite number ≥ 0", least=0.0, most=sys.float_info.max)

    def advantages(values: torch.Tensor) -> torch.Tensor:
        centred = _centred(values)
        if not divide_by_std or not centred.any():
            return centred
        return centred / (values.std() + added)

    return _rewarded("group_relative", rewards, groups, trainable, trajectories).mapped(advantages)


def leave_one_out(
    rewards: RolloutBatch | torch.Tensor,
    groups: torch.Tensor | None = None,
    trainable: torch.Tensor | None = None,
    *,
    trajectories: torch.Tensor | None = None,
) -> torch.Tensor:
    """(B,) float32: by how much each trajectory did better than the others of its group; RLOO's.

    Of trajectory i, over the n counted ones of its group::

        A_i = r_i - Σ_{j≠i} r_j / (n - 1)

    Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024,
    arXiv:2402.14740. The baseline does not depend on what it is subtracted from, so the gradient
    stays unbiased. Where n = 1 there is no baseline: 0.0.

    Args and Raises: As `group_relative`, as are the rows that get 0.0.
    """

    def advantages(values: torch.Tensor) -> torch.Tensor:
        others = max(len(values) - 1, 1)
        return _centred(values) * len(values) / others

    return _rewarded("leave_one_out", rewards, groups, trainable, trajectories).mapped(advantages)


def pass_at_k(
    rewards: RolloutBatch | torch.Tensor,
    groups: torch.Tensor | None = None,
    trainable: torch.Tensor | None = None,
    *,
    k: int,
    threshold: float = 1.0,
    trajectories: torch.Tensor | None = None,
) -> float:
    """How likely it is that one of k trajectories of a prompt passes, averaged over the prompts.

    The unbiased estimate from n ≥ k counted trajectories of which c have passed::

        pass@k = mean over groups of  1 - C(n - c, k) / C(n, k)

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, section
    2.1; computed without large numbers as 1 - Π_{i=n-c+1..n} (1 - k / i). A trajectory of unknown
    reward has neither passed nor not: it does not count, nor does a group with fewer than k of the
    others.

    Args:
        rewards, groups, trainable, trajectories: As for `group_relative`.
        k: How many attempts there are.
        threshold: A trajectory passes with this reward or more; rounded as the rewards are, which
            are float32 in the tensors of a batch without its trajectories.

    Raises:
        ValueError: As `group_relative`; or `k` is no count, `threshold` no number, or no group has
            so many trajectories that count.
    """
    rows = _rows_of(rewards, groups, trainable, trajectories)
    least = rows.rounded(_number("threshold", threshold, "a number"))

    def estimate(values: torch.Tensor) -> float:
        n, c = len(values), int((values >= least).sum())
        if n - c < k:
            return 1.0
        return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))

    return rows.averaged(estimate, k)


def mean_at_k(
    rewards: RolloutBatch | torch.Tensor,
    groups: torch.Tensor | None = None,
    trainable: torch.Tensor | None = None,
    *,
    k: int,
    trajectories: torch.Tensor | None = None,
) -> float:
    """The expected mean reward of k trajectories of a prompt, averaged over the prompts.

    Estimated from all n ≥ k counted trajectories of a group, since which k of them are taken makes
    no difference to the expectation::

        mean@k = mean over groups of  Σ r_j / n

    Args:
        rewards, groups, trainable, trajectories: As for `group_relative`.
        k: How many a prompt must have; a group with fewer that count is left out.

    Raises:
        ValueError: As `pass_at_k`.
    """
    rows = _rows_of(rewards, groups, trainable, trajectories)
    return rows.averaged(lambda values: float(values.mean()), k)


def _rewarded(
    what: str, rewards: RolloutBatch | torch.Tensor, groups: Any, trainable: Any, trajectories: Any
) -> _Rows:
    """The rows; that none of them has a reward is said."""
    rows = _rows_of(rewards, groups, trainable, trajectories)
    count = rows.rewards.numel()
    if count and rows.rewards.isnan().all() and what not in _hinted:
        _hinted.add(what)
        logger.warning(
            "%s: none of %d rows has a reward, so that every advantage is 0 and nothing is "
            "learned. Give one as open_rollout(…, reward=…), or have the agent set context.reward; "
            "trajectories that failed have none. (Said once.)",
            what,
            count,
        )
    return rows


def _centred(values: torch.Tensor) -> torch.Tensor:
    """What they differ from their mean; exactly 0 where all are the same, which a mean is not."""
    shifted = values - values[0]
    return shifted - shifted.mean()


class _Rows(NamedTuple):
    """B rows.

    Attributes:
        rewards: (B,) float64, NaN unknown: of the trajectory.
        is_trainable: (B,) bool.
        trajectories: (B,) int64, distinct over all groups.
        groups: (B,), of any type of numbers.
        given_as: The type that the rewards were given in.
    """

    rewards: torch.Tensor
    is_trainable: torch.Tensor
    trajectories: torch.Tensor
    groups: torch.Tensor
    given_as: torch.dtype

    def rounded(self, number: float) -> float:
        """A number as the rewards were rounded that were as large."""
        is_float = self.given_as.is_floating_point
        return torch.tensor(number, dtype=self.given_as).item() if is_float else number

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """(B,) float32: `function` of the counted rewards of each group, on all their rows."""
        of_trajectories = torch.zeros_like(self.rewards)  # there are no more of them than rows
        for first in self._groups():
            of_trajectories[self.trajectories[first]] = function(self.rewards[first])
        values = of_trajectories[self.trajectories]
        return torch.where(self._is_counted, values, 0.0).to(torch.float32)

    def averaged(self, function: Callable[[torch.Tensor], float], k: int) -> float:
        """The mean of `function` over groups that have k counted rewards."""
        if not isinstance(k, Integral) or isinstance(k, bool) or k < 1:
            raise ValueError(f"k = {k!r}: expected an integer ≥ 1")
        counted = [self.rewards[first] for first in self._groups()]
        values = [function(each) for each in counted if len(each) >= k]
        if not values:
            most = max(map(len, counted), default=0)
            raise ValueError(
                f"k = {k}: no group has so many trajectories of known reward, the largest has "
                f"{most}"
            )
        return sum(values) / len(values)

    @property
    def _is_counted(self) -> torch.Tensor:
        return self.is_trainable & ~self.rewards.isnan()

    def _groups(self) -> list[torch.Tensor]:
        """Of each group the first counted row of each of its trajectories."""
        first: dict[int, dict[int, int]] = {}
        counted = self._is_counted.nonzero().squeeze(-1).tolist()
        groups, trajectories = self.groups.tolist(), self.trajectories.tolist()
        for row in counted:
            first.setdefault(groups[row], {}).setdefault(trajectories[row], row)
        return [
            torch.tensor(list(rows.values()), device=self.rewards.device) for rows in first.values()
        ]


def _rows_of(
    rewards: RolloutBatch | torch.Tensor, groups: Any, trainable: Any, trajectories: Any
) -> _Rows:
    if not isinstance(rewards, torch.Tensor) and hasattr(rewards, "tensors"):
        beside = {"groups": groups, "trainable": trainable, "trajectories": trajectories}
        if extra := [name for name, value in beside.items() if value is not None]:
            raise ValueError(f"{', '.join(extra)}: expected nothing beside a batch, which has them")
        return _finite(_rows_of_batch(rewards))
    if groups is None:
        raise ValueError("groups = None: expected (B,) groups beside rewards that are no batch")
    given_as = _numbers("rewards", rewards)
    values = given_as.to(torch.float64)
    own = _numbers("groups", groups).to(values.device)
    is_trainable = (
        torch.ones_like(values, dtype=torch.bool)
        if trainable is None
        else _numbers("trainable", trainable).to(values.device).bool()
    )
    each = (
        torch.arange(own.numel(), device=values.device)
        if trajectories is None
        else _numbers("trajectories", trajectories).to(values.device)
    )
    given = {"rewards": values, "groups": own, "trainable": is_trainable, "trajectories": each}
    if any(tensor.shape != (values.numel(),) for tensor in given.values()):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in given.items())
        raise ValueError(f"expected tensors of one shape (B,), got {shapes}")
    ranks = [torch.unique(ids, return_inverse=True)[1] for ids in (own, each)]
    distinct = torch.unique(torch.stack(ranks, dim=-1), dim=0, return_inverse=True)[1]
    return _finite(_Rows(values, is_trainable, distinct, own, given_as.dtype))


def _finite(rows: _Rows) -> _Rows:
    infinite = rows.rewards.isinf().nonzero().flatten().tolist()
    if infinite:
        row = infinite[0]
        raise ValueError(
            f"rewards[{row}] = {rows.rewards[row].item()}: expected finite numbers, and NaN where "
            "one is unknown"
        )
    return rows


def _number(
    name: str, given: Any, expected: str, *, least: float = -math.inf, most: float = math.inf
) -> float:
    number = math.nan
    if isinstance(given, Real) and not isinstance(given, bool):
        with suppress(OverflowError):
            number = float(given)
    if not least <= number <= most:
        raise ValueError(f"{name} = {given!r:.80}: expected {expected}")
    return number


def _numbers(name: str, given: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} = {given!r:.80}: expected (B,) numbers: {error}") from None


def _rows_of_batch(batch: RolloutBatch) -> _Rows:
    tensors, samples = batch.tensors, batch.samples
    numbers: dict[tuple[int, int], int] = {}
    rows = [numbers.setdefault((row.group, row.member), len(numbers)) for row in samples]
    known = {(each.group, each.member): each.reward for each in batch.trajectories}
    device = tensors["rewards"].device
    rewards, given_as = tensors["rewards"].to(torch.float64), tensors["rewards"].dtype
    if known:  # else the rows are all there is
        of_trajectories = [known[row.group, row.member] for row in samples]
        listed = [math.nan if each is None else each for each in of_trajectories]
        rewards = torch.tensor(listed, dtype=torch.float64, device=device)
        given_as = rewards.dtype
    return _Rows(
        rewards,
        tensors["trainable"].bool(),
        torch.tensor(rows, dtype=torch.int64, device=device),
        tensors["groups"],
        given_as,
    )
