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
    get 0.0. For the arguments see the module.
    """
    rows = _read_rows(rewards, groups, trainable, trajectories)
    rows.warn_unrewarded("group_relative")

    def advantage(values: list[float]) -> list[float]:
        centred = _center(values)
        if not divide_by_std:
            return centred
        deviation = math.sqrt(sum(each**2 for each in centred) / max(len(values) - 1, 1))
        return [each / (deviation + epsilon) if each else 0.0 for each in centred]

    return rows.spread(advantage)


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
    rows = _read_rows(rewards, groups, trainable, trajectories)
    rows.warn_unrewarded("leave_one_out")
    return rows.spread(
        lambda values: [each * len(values) / max(len(values) - 1, 1) for each in _center(values)]
    )


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
    rows = _read_rows(rewards, groups, trainable, trajectories)
    if rows.dtype.is_floating_point:
        threshold = torch.tensor(threshold, dtype=rows.dtype).item()
    estimates = []
    for values in rows.find_large(k):
        failed = sum(value < threshold for value in values)
        estimates.append(1.0 - math.comb(failed, k) / math.comb(len(values), k))
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
    rows = _read_rows(rewards, groups, trainable, trajectories)
    means = [sum(values) / len(values) for values in rows.find_large(k)]
    return sum(means) / len(means)


class _Rows(NamedTuple):
    """B rows by their trajectories.

    Attributes:
        keys: Of each row its group and its trajectory; None where the row does not count.
        rewards: Of each group those of its counted trajectories.
        is_unrewarded: No row has a reward.
        dtype, device: Of the rewards.
    """

    keys: list[tuple[float, float] | None]
    rewards: dict[float, dict[float, float]]
    is_unrewarded: bool
    dtype: torch.dtype
    device: torch.device

    def spread(self, advantage: Callable[[list[float]], list[float]]) -> torch.Tensor:
        """(B,) float32: what becomes of each group's rewards; 0.0 on rows that do not count."""
        found: dict[tuple[float, float] | None, float] = {}
        for group, rewards in self.rewards.items():
            values = advantage(list(rewards.values()))
            found |= {(group, each): value for each, value in zip(rewards, values, strict=True)}
        on_rows = [found.get(key, 0.0) for key in self.keys]
        return torch.tensor(on_rows, dtype=torch.float32, device=self.device)

    def find_large(self, k: Any) -> list[list[float]]:
        """The rewards of the groups that have k counted trajectories; a ValueError without any."""
        if not isinstance(k, Integral) or isinstance(k, bool) or k < 1:
            raise ValueError(f"k = {k!r}: expected an integer ≥ 1")
        large = [list(each.values()) for each in self.rewards.values() if len(each) >= int(k)]
        if not large:
            most = max(map(len, self.rewards.values()), default=0)
            raise ValueError(
                f"k = {k}: no group has so many trajectories of known reward, the largest has "
                f"{most}"
            )
        return large

    def warn_unrewarded(self, what: str) -> None:
        """Say once that no row has a reward."""
        if self.keys and self.is_unrewarded and what not in _hinted:
            _hinted.add(what)
            logger.warning(
                "%s: none of %d rows has a reward, so that every advantage is 0 and nothing is "
                "learned. Give one as open_rollout(…, reward=…), or have the agent set "
                "context.reward; trajectories that failed have none. (Said once.)",
                what,
                len(self.keys),
            )


def _center(rewards: list[float]) -> list[float]:
    """Less their mean: exactly 0 where all are the same."""
    least = min(rewards)
    mean = sum(each - least for each in rewards) / len(rewards)
    return [each - least - mean for each in rewards]


def _read_rows(
    rewards: RolloutBatch | torch.Tensor, groups: Any, trainable: Any, trajectories: Any
) -> _Rows:
    given = {"groups": groups, "trainable": trainable, "trajectories": trajectories}
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(rewards, torch.Tensor) and hasattr(rewards, "tensors"):
        if given:
            raise ValueError(f"{', '.join(given)}: expected nothing beside a batch, which has them")
        tensors, device = _read_batch(rewards), rewards.tensors["rewards"].device
    else:
        if groups is None:
            raise ValueError("groups = None: expected (B,) groups beside rewards that are no batch")
        tensors = {k: torch.as_tensor(v) for k, v in {"rewards": rewards, **given}.items()}
        device, count = tensors["rewards"].device, tensors["rewards"].numel()
        tensors.setdefault("trainable", torch.ones(count, dtype=torch.bool))
        tensors.setdefault("trajectories", torch.arange(count))
        if any(tensor.shape != (count,) for tensor in tensors.values()):
            shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in tensors.items())
            raise ValueError(f"expected tensors of one shape (B,), got {shapes}")
    columns = {name: tensor.tolist() for name, tensor in tensors.items()}
    keys: list[tuple[float, float] | None] = []
    found: dict[float, dict[float, float]] = {}
    for row, reward in enumerate(columns["rewards"]):
        if math.isinf(reward):
            raise ValueError(
                f"rewards[{row}] = {reward}: expected finite numbers, and NaN where one is unknown"
            )
        group, trajectory = columns["groups"][row], columns["trajectories"][row]
        is_counted = columns["trainable"][row] and not math.isnan(reward)
        keys.append((group, trajectory) if is_counted else None)
        if is_counted:
            found.setdefault(group, {}).setdefault(trajectory, float(reward))
    is_unrewarded = all(map(math.isnan, columns["rewards"]))
    return _Rows(keys, found, is_unrewarded, tensors["rewards"].dtype, device)


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
        "trainable": tensors["trainable"],
        "trajectories": torch.tensor([row.member for row in samples], dtype=torch.int64),
    }
