"""Advantages within groups, and what validation says: from a batch, or from plain tensors.

Shapes: B rows, one a segment; a trajectory has one or several. What counts is one reward for each
trajectory: of a batch `Trajectory.reward`; of plain tensors that of its first row that counts.
"Counted" are trajectories that are trainable and whose reward is known (not NaN).

All functions take a `RolloutBatch`, which needs no further tensors, or (B,) ``rewards``, NaN
unknown, with (B,) ``groups``, the group of each row; (B,) ``trainable``, bool, None: every row is;
and (B,) ``trajectories``, which trajectory of its group each row is of, None: each of its own. They
raise a ValueError where tensors are not of one length, ``groups`` is missing or stands beside a
batch, or a reward is infinite: a reward function that returns that has failed.
"""

from __future__ import annotations

import logging
import math
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rollout.batch.rollout_batch import RolloutBatch

logger = logging.getLogger("rollout")

#: Added to a standard deviation, so that nothing is divided by 0.
EPSILON = 1e-6
#: Functions that have logged that a batch has no rewards.
_hinted: set[str] = set()
_UNREWARDED = (
    "%s: none of %d rows has a reward, so that every advantage is 0 and nothing is learned. Give "
    "one as open_rollout(…, reward=…), or have the agent set context.reward; trajectories that "
    "failed have none. (Said once.)"
)


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
    get 0.0. For the arguments see the module.
    """
    counted = _Counted(rewards, groups, trainable, trajectories, hint="group_relative")
    values = counted.center()
    if divide_by_std:
        others = (counted.sizes - 1).clamp(min=1)
        deviation = (counted.sum_groups(values**2) / others).sqrt()
        values = (values / (deviation + epsilon)[counted.groups]).nan_to_num(0.0)  # 0 / 0
    return counted.spread(values)


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
    stays unbiased. Where n = 1 there is no baseline: 0.0. The rest is as with `group_relative`.
    """
    counted = _Counted(rewards, groups, trainable, trajectories, hint="leave_one_out")
    scale = counted.sizes / (counted.sizes - 1).clamp(min=1)
    return counted.spread(counted.center() * scale[counted.groups])


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
    2.1. A trajectory of unknown reward has neither passed nor not: it does not count, nor does a
    group with fewer than k of the others.

    Args:
        rewards, groups, trainable, trajectories: See the module.
        k: How many attempts there are.
        threshold: A trajectory passes with this reward or more; rounded as the rewards are, which
            are float32 in the tensors of a batch without its trajectories.

    Raises:
        ValueError: `k` is no count, or no group has so many trajectories that count.
    """
    counted = _Counted(rewards, groups, trainable, trajectories)
    large = counted.sum_large(counted.rewards < threshold, k)
    estimates = [1.0 - math.comb(int(failed), k) / math.comb(n, k) for n, failed in large]
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
    no difference to the expectation. Args and Raises: As `pass_at_k`.
    """
    counted = _Counted(rewards, groups, trainable, trajectories)
    large = counted.sum_large(counted.rewards, k)
    return sum(total / n for n, total in large) / len(large)


class _Counted:
    """The N trajectories that count, of G groups, and which rows are theirs; on the CPU.

    Args:
        rewards, groups, trainable, trajectories: See the module.
        hint: Names the function that says once where no row has a reward.

    Attributes:
        rewards: (N,) in the type that they came in.
        groups: (N,) the number of each one's group, from 0.
        sizes: (G,) how many count in each group.
        rows: (B,) the number of each row's trajectory; N where the row does not count.
    """

    def __init__(
        self, rewards: Any, groups: Any, trainable: Any, trajectories: Any, hint: str = ""
    ) -> None:
        others = {"groups": groups, "trainable": trainable, "trajectories": trajectories}
        others = {name: value for name, value in others.items() if value is not None}
        if not isinstance(rewards, torch.Tensor) and hasattr(rewards, "tensors"):
            if others:
                names = ", ".join(others)
                raise ValueError(f"{names}: expected nothing beside a batch, which has them")
            others, rewards = _read_batch(rewards), rewards.tensors["rewards"]
        elif groups is None:
            raise ValueError("groups = None: expected (B,) groups beside rewards that are no batch")
        self._device = torch.as_tensor(rewards).device
        tensors = _check_tensors({"rewards": rewards, **others})
        values = tensors["rewards"]
        if hint and hint not in _hinted and len(values) and bool(values.isnan().all()):
            _hinted.add(hint)
            logger.warning(_UNREWARDED, hint, len(values))
        counted = (tensors["trainable"].bool() & ~values.isnan()).nonzero().flatten()
        numbers = (tensors["groups"], tensors["trajectories"])
        keys = torch.stack([torch.unique(each, return_inverse=True)[1] for each in numbers])
        pairs, own = torch.unique(keys[:, counted], dim=1, return_inverse=True)
        found = torch.unique(pairs[0], return_inverse=True, return_counts=True)
        self.groups: torch.Tensor = found[1]
        self.sizes: torch.Tensor = found[2]
        count = len(self.groups)
        self.rows: torch.Tensor = own.new_full(values.shape, count).index_copy(0, counted, own)
        first = own.new_full((count,), len(values)).scatter_reduce(0, own, counted, "amin")
        self.rewards: torch.Tensor = values[first]

    def sum_groups(self, values: torch.Tensor) -> torch.Tensor:
        """(G,) float64: the sum over each group."""
        sums = self.sizes.new_zeros(self.sizes.shape, dtype=torch.float64)
        return sums.index_add(0, self.groups, values.double())

    def center(self) -> torch.Tensor:
        """(N,) float64: the rewards less their group's mean: exactly 0 where all are the same."""
        rewards = self.rewards.double()
        least = rewards.new_full(self.sizes.shape, torch.inf)
        rewards = rewards - least.scatter_reduce(0, self.groups, rewards, "amin")[self.groups]
        return rewards - (self.sum_groups(rewards) / self.sizes)[self.groups]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) float32: each trajectory's value on its rows; 0.0 on rows that do not count."""
        return torch.cat([values, values.new_zeros(1)])[self.rows].float().to(self._device)

    def sum_large(self, values: torch.Tensor, k: Any) -> list[tuple[int, float]]:
        """Size and sum of each group of k or more; a ValueError where there is none."""
        if not isinstance(k, Integral) or isinstance(k, bool) or k < 1:
            raise ValueError(f"k = {k!r}: expected an integer ≥ 1")
        sizes, sums = self.sizes.tolist(), self.sum_groups(values).tolist()
        large = [(size, total) for size, total in zip(sizes, sums, strict=True) if size >= k]
        if not large:
            raise ValueError(
                f"k = {k}: no group has so many trajectories of known reward, the largest has "
                f"{max(sizes, default=0)}"
            )
        return large


def _check_tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """On the CPU, whatever torch's default device is; those that were left out too."""
    tensors = {name: torch.as_tensor(each).detach().cpu() for name, each in values.items()}
    rewards, count = tensors["rewards"], tensors["rewards"].numel()
    tensors.setdefault("trainable", rewards.new_ones(count, dtype=torch.bool))
    tensors.setdefault("trajectories", torch.arange(count, device="cpu"))
    if any(tensor.shape != (count,) for tensor in tensors.values()):
        shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in tensors.items())
        raise ValueError(f"expected tensors of one shape (B,), got {shapes}")
    for row in rewards.isinf().nonzero().flatten().tolist():
        found = f"rewards[{row}] = {rewards[row].item()}"
        raise ValueError(f"{found}: expected finite numbers, and NaN where one is unknown")
    return tensors


def _read_batch(batch: RolloutBatch) -> dict[str, Any]:
    tensors, samples = batch.tensors, batch.samples
    read = {"groups": tensors["groups"], "trainable": tensors["trainable"]}
    read["trajectories"] = [row.member for row in samples]
    known = {(each.group, each.member): each.reward for each in batch.trajectories}
    if known:  # else the rows are all there is
        listed = [known[row.group, row.member] for row in samples]
        rewards = [math.nan if each is None else each for each in listed]
        read["rewards"] = torch.tensor(rewards, dtype=torch.float64)
    return read
