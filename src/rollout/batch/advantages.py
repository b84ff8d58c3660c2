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
    added = _check_number("epsilon", epsilon, "a finite number ≥ 0", 0.0, sys.float_info.max)
    rows = _read_rows(rewards, groups, trainable, trajectories)
    _warn_unrewarded("group_relative", rows)
    centred = rows.center()
    if divide_by_std:
        variance = rows.sum(centred**2) / (rows.counts - 1).clamp(min=1)
        spread = variance.sqrt()[rows.groups[rows.heads]] + added
        centred = torch.where(centred == 0.0, 0.0, centred / spread)
    return rows.spread(centred)


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
    rows = _read_rows(rewards, groups, trainable, trajectories)
    _warn_unrewarded("leave_one_out", rows)
    scale = rows.counts / (rows.counts - 1).clamp(min=1)
    return rows.spread(rows.center() * scale[rows.groups[rows.heads]])


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
    rows = _read_rows(rewards, groups, trainable, trajectories)
    least = _check_number("threshold", threshold, "a number")
    if rows.dtype.is_floating_point:
        least = torch.tensor(least, dtype=rows.dtype).item()
    is_large = rows.find_large(k)
    passed = rows.sum((rows.rewards[rows.heads] >= least).double())
    estimates = [
        1.0 if n - c < k else 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))
        for n, c in zip(
            rows.counts[is_large].tolist(), passed[is_large].int().tolist(), strict=True
        )
    ]
    return sum(estimates) / len(estimates)


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
    rows = _read_rows(rewards, groups, trainable, trajectories)
    is_large = rows.find_large(k)
    sums = rows.sum(rows.rewards[rows.heads])
    return (sums[is_large] / rows.counts[is_large]).mean().item()


class _Rows(NamedTuple):
    """B rows on the CPU, of T trajectories in G groups, of which H trajectories count.

    Attributes:
        rewards: (B,) float64, NaN unknown: of the trajectory.
        is_counted: (B,) bool: trainable, and of known reward.
        trajectories: (B,) int64, 0 … T - 1 over all groups.
        groups: (B,) int64, 0 … G - 1.
        heads: (H,) int64: the first counted row of each trajectory that has one.
        counts: (G,) int64: counted trajectories of each group.
        dtype: The type that the rewards had.
        device: Where they were.
    """

    rewards: torch.Tensor
    is_counted: torch.Tensor
    trajectories: torch.Tensor
    groups: torch.Tensor
    heads: torch.Tensor
    counts: torch.Tensor
    dtype: torch.dtype
    device: torch.device

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """(G,) float64: the sum over each group of (H,) values."""
        return (
            torch.zeros(len(self.counts)).double().scatter_add(0, self.groups[self.heads], values)
        )

    def center(self) -> torch.Tensor:
        """(H,) rewards less the mean of their group: exactly 0 where all are the same."""
        own, groups = self.rewards[self.heads], self.groups[self.heads]
        least = torch.zeros(len(self.counts)).double()
        least = least.scatter_reduce(0, groups, own, "amin", include_self=False)
        shifted = own - least[groups]
        return shifted - (self.sum(shifted) / self.counts.clamp(min=1))[groups]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) float32: (H,) values on all counted rows of their trajectories, 0.0 on others."""
        of_trajectories = torch.zeros(len(self.rewards)).double()  # no more of them than rows
        of_trajectories[self.trajectories[self.heads]] = values
        found = torch.where(self.is_counted, of_trajectories[self.trajectories], 0.0)
        return found.to(self.device, torch.float32)

    def find_large(self, k: Any) -> torch.Tensor:
        """(G,) bool: which groups have k counted trajectories.

        Raises:
            ValueError: `k` is no count, or none has.
        """
        if not isinstance(k, Integral) or isinstance(k, bool) or k < 1:
            raise ValueError(f"k = {k!r}: expected an integer ≥ 1")
        is_large = self.counts >= int(k)
        if not is_large.any():
            most = max(self.counts.tolist(), default=0)
            raise ValueError(
                f"k = {k}: no group has so many trajectories of known reward, the largest has "
                f"{most}"
            )
        return is_large


def _warn_unrewarded(what: str, rows: _Rows) -> None:
    """Say once that no row has a reward."""
    count = len(rows.rewards)
    if count and rows.rewards.isnan().all() and what not in _hinted:
        _hinted.add(what)
        logger.warning(
            "%s: none of %d rows has a reward, so that every advantage is 0 and nothing is "
            "learned. Give one as open_rollout(…, reward=…), or have the agent set context.reward; "
            "trajectories that failed have none. (Said once.)",
            what,
            count,
        )


def _read_rows(
    rewards: RolloutBatch | torch.Tensor, groups: Any, trainable: Any, trajectories: Any
) -> _Rows:
    if not isinstance(rewards, torch.Tensor) and hasattr(rewards, "tensors"):
        beside = {"groups": groups, "trainable": trainable, "trajectories": trajectories}
        if extra := [name for name, value in beside.items() if value is not None]:
            raise ValueError(f"{', '.join(extra)}: expected nothing beside a batch, which has them")
        tensors = _read_batch(rewards)
        device = rewards.tensors["rewards"].device
    else:
        if groups is None:
            raise ValueError("groups = None: expected (B,) groups beside rewards that are no batch")
        tensors = {
            "rewards": _as_tensor("rewards", rewards),
            "groups": _as_tensor("groups", groups),
        }
        device, count = tensors["rewards"].device, tensors["rewards"].numel()
        tensors["trainable"] = (
            torch.ones(count, dtype=torch.bool)
            if trainable is None
            else _as_tensor("trainable", trainable).bool()
        )
        tensors["trajectories"] = (
            torch.arange(count)
            if trajectories is None
            else _as_tensor("trajectories", trajectories)
        )
        if any(tensor.shape != (count,) for tensor in tensors.values()):
            shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in tensors.items())
            raise ValueError(f"expected tensors of one shape (B,), got {shapes}")
    own, of_groups, is_trainable, each = (tensor.cpu() for tensor in tensors.values())
    values = own.double()
    if values.isinf().any():
        row = int(values.isinf().nonzero()[0])
        raise ValueError(
            f"rewards[{row}] = {values[row].item()}: expected finite numbers, and NaN where one is "
            "unknown"
        )
    names, of_groups = torch.unique(of_groups, return_inverse=True)
    ranks = torch.stack([of_groups, torch.unique(each, return_inverse=True)[1]], dim=-1)
    numbers = torch.unique(ranks, dim=0, return_inverse=True)[1]
    is_counted = is_trainable & ~values.isnan()
    counted, rows = is_counted.nonzero().flatten(), len(values)
    first = torch.full((rows,), rows).scatter_reduce(0, numbers[counted], counted, "amin")
    heads = first[first < rows]
    counts = torch.bincount(of_groups[heads], minlength=len(names))
    return _Rows(values, is_counted, numbers, of_groups, heads, counts, own.dtype, device)


def _read_batch(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    tensors, samples = batch.tensors, batch.samples
    rewards = tensors["rewards"]
    known = {(each.group, each.member): each.reward for each in batch.trajectories}
    if known:  # else the rows are all there is
        of_rows = [known[row.group, row.member] for row in samples]
        listed = [math.nan if each is None else each for each in of_rows]
        rewards = torch.tensor(listed, dtype=torch.float64)
    return {
        "rewards": rewards,
        "groups": tensors["groups"],
        "trainable": tensors["trainable"].bool(),
        "trajectories": torch.tensor([row.member for row in samples], dtype=torch.int64),
    }


def _check_number(
    name: str, value: Any, expected: str, least: float = -math.inf, most: float = math.inf
) -> float:
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
    if not least <= number <= most:
        raise ValueError(f"{name} = {value!r:.80}: expected {expected}")
    return number


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} = {value!r:.80}: expected (B,) numbers: {error}") from None
