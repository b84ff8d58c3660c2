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
    from collections.abc import Callable

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

    def compare(rewards: list[float]) -> list[float]:
        values = _center(rewards)
        variance = math.fsum(value * value for value in values) / max(len(values) - 1, 1)
        scale = math.sqrt(variance) + epsilon if divide_by_std else 1.0
        return [value and value / scale for value in values]  # 0.0 also where the scale is 0

    counted = _Counted(rewards, groups, trainable, trajectories, hint="group_relative")
    return counted.spread(compare)


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

    def compare(rewards: list[float]) -> list[float]:
        scale = len(rewards) / max(len(rewards) - 1, 1)
        return [value * scale for value in _center(rewards)]

    counted = _Counted(rewards, groups, trainable, trajectories, hint="leave_one_out")
    return counted.spread(compare)


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
    lowest, chances = counted.round(threshold), []
    for each in counted.list_large(k):
        failed = sum(reward < lowest for reward in each)
        chances.append(1.0 - math.comb(failed, k) / math.comb(len(each), k))
    return sum(chances) / len(chances)


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
    large = counted.list_large(k)
    return sum(math.fsum(rewards) / len(rewards) for rewards in large) / len(large)


class _Counted:
    """The rewards of the trajectories that count, by group.

    Args:
        rewards, groups, trainable, trajectories: See the module.
        hint: Names the function that says once where no row has a reward.
    """

    def __init__(
        self, rewards: Any, groups: Any, trainable: Any, trajectories: Any, hint: str = ""
    ) -> None:
        columns = {"groups": groups, "trainable": trainable, "trajectories": trajectories}
        columns = {name: value for name, value in columns.items() if value is not None}
        if not isinstance(rewards, torch.Tensor) and hasattr(rewards, "tensors"):
            if columns:
                names = ", ".join(columns)
                raise ValueError(f"{names}: expected nothing beside a batch, which has them")
            columns, rewards = _read_batch(rewards), rewards.tensors["rewards"]
        elif groups is None:
            raise ValueError("groups = None: expected (B,) groups beside rewards that are no batch")
        self._device = torch.as_tensor(rewards).device
        tensors = _check_tensors({"rewards": rewards, **columns})
        self._dtype = tensors["rewards"].dtype
        if hint and hint not in _hinted and len(rewards) and tensors["rewards"].isnan().all():
            _hinted.add(hint)
            logger.warning(_UNREWARDED, hint, len(rewards))
        self._groups: dict[Any, dict[Any, float]] = {}
        self._rows: list[Any] = []  # the group and the trajectory of each row that counts
        keys = ("rewards", "trainable", "groups", "trajectories")
        listed = (tensors[key].tolist() for key in keys)
        for reward, is_trainable, *row in zip(*listed, strict=True):
            is_counted = is_trainable and not math.isnan(reward)
            self._rows.append(tuple(row) if is_counted else None)
            if is_counted:
                self._groups.setdefault(row[0], {}).setdefault(row[1], reward)

    def round(self, value: float) -> float:
        """A number as the type of the rewards has it."""
        is_float = self._dtype.is_floating_point
        return torch.tensor(value, dtype=self._dtype, device="cpu").item() if is_float else value

    def spread(self, compare: Callable[[list[float]], list[float]]) -> torch.Tensor:
        """(B,) float32: each trajectory's value on its rows; 0.0 on rows that do not count.

        Args:
            compare: Makes of the rewards of a group the value of each.
        """
        values = {
            (group, trajectory): value
            for group, members in self._groups.items()
            for trajectory, value in zip(members, compare(list(members.values())), strict=True)
        }
        listed = [values.get(row, 0.0) for row in self._rows]
        return torch.tensor(listed, dtype=torch.float32, device=self._device)

    def list_large(self, k: Any) -> list[list[float]]:
        """The rewards of each group of k or more; a ValueError where there is none."""
        if not isinstance(k, Integral) or isinstance(k, bool) or k < 1:
            raise ValueError(f"k = {k!r}: expected an integer ≥ 1")
        rewards = [list(members.values()) for members in self._groups.values()]
        if large := [each for each in rewards if len(each) >= k]:
            return large
        raise ValueError(
            f"k = {k}: no group has so many trajectories of known reward, the largest has "
            f"{max(map(len, rewards), default=0)}"
        )


def _center(rewards: list[float]) -> list[float]:
    """The rewards less their mean: exactly 0 where all are the same."""
    least = min(rewards)
    mean = math.fsum(reward - least for reward in rewards) / len(rewards)
    return [reward - least - mean for reward in rewards]


def _check_tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """On the CPU, whatever torch's default device is; those that were left out too."""
    tensors = {name: torch.as_tensor(each).detach().cpu() for name, each in values.items()}
    rewards = tensors["rewards"]
    tensors.setdefault("trainable", torch.ones_like(rewards, dtype=torch.bool))
    tensors.setdefault("trajectories", torch.arange(rewards.numel(), device="cpu"))
    if any(tensor.shape != (rewards.numel(),) for tensor in tensors.values()):
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
