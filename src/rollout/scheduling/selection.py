"""Which groups are taken, and what that does to the sample."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollout.chat.trajectory import Group
from rollout.config.group_policy import can_judge
from rollout.errors import ConfigError, PromptError
from rollout.limits import CARRY_S
from rollout.scheduling.endings import describe_ending
from rollout.scheduling.members import GROUP_S
from rollout.scheduling.rewards.functions import GROUP, SINGLE
from rollout.types import Outcome
from rollout.user_code import named_object

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.chat.trajectory import Trajectory

Accept = Callable[[Group], bool]

#: Different rewards of a refused group that an error lists.
LISTED = 8

#: Deadlines that a call sets, and not the task: what meets them would have become longer.
CUTTING_LIMITS = frozenset((GROUP_S, "limits.batch_s", CARRY_S))


def has_signal(group: Group) -> bool:
    """Whether the rewards of a group's trainable members are not all equal.

    A group whose members all got the same teaches nothing where advantages are relative to it
    (dynamic sampling, Yu et al. 2025, DAPO). One with fewer than two known rewards has none either.
    Rewards are compared as tensors have them, in float32.
    """
    rewards = (t.reward for t in group.trajectories if t.trainable and t.reward is not None)
    return len({*array("f", rewards)}) > 1


def find_accept(accept: object) -> Accept | None:
    """Find the function that a policy's `accept` is or names.

    Raises:
        ConfigError: There is none of that name.
    """
    if accept is None or not isinstance(accept, str):
        return accept  # type: ignore[return-value]  # the policy has checked that it is callable
    found: Any = named_object(accept, "scheduling.groups.accept")
    if not can_judge(found):
        raise ConfigError(
            f"scheduling.groups.accept = {accept!r}: expected a function (no coroutine) of a Group "
            "that returns a bool"
        )
    return found  # type: ignore[no-any-return]


def call_accept(accept: Accept | None, group: Group) -> bool:
    """Return what `accept` returns for a group.

    Raises:
        PromptError: That is no bool.
    """
    if accept is None:
        return True
    answer = accept(group)
    if type(answer).__name__ not in ("bool", "bool_"):
        raise PromptError(f"accept returned {answer!r:.80} for {group.uid!r}; expected a bool")
    return bool(answer)


def describe_refusal(group: Group, accept: object) -> str:
    """Say which function refused a group, its rewards, and which member failed first."""
    name = getattr(accept, "__name__", type(accept).__name__)
    rewards = Counter(
        "unknown" if each.reward is None else f"{each.reward:g}" for each in group.trajectories
    )
    listed = ", ".join(f"{times} × {reward}" for reward, times in rewards.most_common(LISTED))
    what = f"{group.uid!r}, by {name} with the rewards {listed}"
    lost = [each for each in group.trajectories if not each.trainable]
    failed = [each for each in lost if each.cause is not None] or lost
    return f"{what}; {describe_ending(failed[0])}" if failed else what


class Selection:
    """What a call took of what it had run, in numbers.

    * ``selection/length/{accepted,finished,started}``: mean sampled tokens of trajectories: of
      groups that were taken; of all that ended by themselves; of those and of all that were cut
      off (cancelled, carried, or ended by a deadline of the call or the group), as far as they had
      come; while the call is open, what runs is like what was cut off;
    * ``selection/reward/{accepted,finished}``: mean known rewards; where groups have a reward, of
      those in groups that have it;
    * ``selection/length_bias``: the mean length of those taken ÷ an estimate of the mean that all
      would have had, those that were cut off included; below 1 where short answers are preferred.
      Absent where all were cut off.

    `Groups.count` has the further ``groups/…``: what became of groups at the end of the call; what
    had finished and was not taken is carried.

    Args:
        by_group: Whether rewards are known only once those of groups are.
    """

    def __init__(self, *, by_group: bool = False) -> None:
        self._by_group = by_group
        #: How many ended, or were cut off, at each length: a stream may have millions.
        self._lengths: Counter[tuple[int, bool]] = Counter()
        self._accepted: Counter[tuple[int, bool]] = Counter()
        #: Of the accepted and of all finished ones: known rewards, and how many there are.
        self._rewards = {"accepted": (0.0, 0), "finished": (0.0, 0)}

    def note_end(self, trajectory: Trajectory) -> None:
        """One has ended, by itself or because it was not wanted any more."""
        if trajectory.outcome in (Outcome.FAILED, Outcome.REJECTED):
            return
        is_cut = is_cut_off(trajectory)
        self._lengths[trajectory.generated_length, is_cut] += 1
        if not is_cut and not self._by_group:
            self._add_reward("finished", trajectory)

    def note_rewards(self, trajectories: Iterable[Trajectory]) -> None:
        """These have the reward of their group, if there is any."""
        for trajectory in trajectories if self._by_group else ():
            if not is_cut_off(trajectory):
                self._add_reward("finished", trajectory)

    def note_cut_off(self, length: int | None) -> None:
        """One is carried to another call at this length, and would have become longer.

        None: its agent had ended.
        """
        if length is not None:
            self._lengths[length, True] += 1

    def note_accepted(self, trajectories: Iterable[Trajectory]) -> None:
        """These are taken."""
        for trajectory in trajectories:
            if trajectory.outcome not in (Outcome.FAILED, Outcome.REJECTED):
                self._accepted[trajectory.generated_length, False] += 1
                self._add_reward("accepted", trajectory)

    def _add_reward(self, name: str, trajectory: Trajectory) -> None:
        if trajectory.reward is not None and math.isfinite(trajectory.reward):
            total, known = self._rewards[name]
            self._rewards[name] = total + trajectory.reward, known + 1

    def metrics(self, running: Iterable[int | None] = ()) -> dict[str, float]:
        """The numbers; see the class.

        Args:
            running: Lengths so far of those that run, as of `note_cut_off`.
        """
        found = {}
        started = self._lengths + Counter((each, True) for each in running if each is not None)
        finished = Counter({key: number for key, number in started.items() if not key[1]})
        lengths = {"accepted": self._accepted, "finished": finished, "started": started}
        for name, counts in lengths.items():
            if counts:
                total = sum(length * number for (length, _), number in counts.items())
                found[f"selection/length/{name}"] = total / counts.total()
        for name, (reward, known) in self._rewards.items():
            if known:
                found[f"selection/reward/{name}"] = reward / known
        mean = mean_length(started)
        if mean and math.isfinite(mean) and self._accepted:
            found["selection/length_bias"] = found["selection/length/accepted"] / mean
        return found


def mean_length(lengths: Iterable[tuple[int, bool]]) -> float:
    """The mean of lengths of which some are only known to be longer than they are here.

    The product-limit estimate (Kaplan and Meier 1958): the area under the share that is still
    running at each length. Where the longest one was cut off a share is left there, and nothing is
    known of what it would have done; it continues as an exponential that has the same share left at
    that length (Brown, Hollander and Korwar 1974).

    Args:
        lengths: Each with whether it was cut off there; or how many there are of each.

    Returns:
        Infinity where all were cut off; 0 where there is none.
    """
    counts = Counter(lengths)
    mean, share, before, left, is_cut = 0.0, 1.0, 0, counts.total(), False
    for (length, is_cut), count in sorted(counts.items()):
        mean += share * (length - before)
        before = length
        if not is_cut:
            share *= 1 - count / left
        left -= count
    if not is_cut:
        return mean
    return math.inf if share == 1.0 else mean + share * before / -math.log(share)


def is_cut_off(trajectory: Trajectory) -> bool:
    """Whether a call, or its policy, ended it before its agent did."""
    if trajectory.outcome is Outcome.CANCELLED:
        return True
    is_over = trajectory.outcome is Outcome.DEADLINE and trajectory.limit_source in CUTTING_LIMITS
    return is_over and trajectory.reason not in (SINGLE, GROUP)
