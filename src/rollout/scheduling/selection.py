"""Which groups are taken, and what that does to the sample."""

from __future__ import annotations

import copy
import math
from array import array
from collections import Counter, defaultdict
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
    * ``selection/reward/{accepted,finished}``: mean known rewards of those, in groups that are
      complete;
    * ``selection/length_bias``: the mean length of those taken ÷ an estimate of the mean that all
      would have had: all tokens ÷ the trajectories that ended by themselves, which is the most
      likely mean where lengths are exponential. Below 1 where short answers are preferred; absent
      where all were cut off.

    `Groups.count` has the further ``groups/…``: what became of groups at the end of the call; what
    had finished and was not taken is carried.
    """

    def __init__(self) -> None:
        #: Of each mean the sum, and how many there are.
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()

    def note_end(self, trajectory: Trajectory) -> None:
        """One has ended, by itself or because it was not wanted any more."""
        if trajectory.outcome not in (Outcome.FAILED, Outcome.REJECTED):
            self._add("length/started", trajectory.generated_length)
            if not is_cut_off(trajectory):
                self._add("length/finished", trajectory.generated_length)

    def note_rewards(self, trajectories: Iterable[Trajectory]) -> None:
        """The group of these is complete, and has its reward, if there is any."""
        for trajectory in trajectories:
            if not is_cut_off(trajectory):
                self._add("reward/finished", trajectory.reward)

    def note_cut_off(self, length: int | None) -> None:
        """One is carried to another call at this length, and would have become longer.

        None: its agent had ended.
        """
        self._add("length/started", length)

    def note_accepted(self, trajectories: Iterable[Trajectory]) -> None:
        """These are taken."""
        for trajectory in trajectories:
            if trajectory.outcome not in (Outcome.FAILED, Outcome.REJECTED):
                self._add("length/accepted", trajectory.generated_length)
                self._add("reward/accepted", trajectory.reward)

    def _add(self, name: str, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self._sums[name] += value
            self._counts[name] += 1

    def metrics(self, running: Iterable[int | None] = ()) -> dict[str, float]:
        """The numbers; see the class.

        Args:
            running: Lengths so far of those that run, as of `note_cut_off`.
        """
        now = copy.deepcopy(self)
        for length in running:
            now.note_cut_off(length)
        sums, counts = now._sums, now._counts
        found = {f"selection/{name}": sums[name] / counts[name] for name in sorted(counts)}
        if counts["length/finished"] and counts["length/accepted"] and sums["length/started"]:
            mean = sums["length/started"] / counts["length/finished"]
            found["selection/length_bias"] = found["selection/length/accepted"] / mean
        return found


def is_cut_off(trajectory: Trajectory) -> bool:
    """Whether a call, or its policy, ended it before its agent did."""
    if trajectory.outcome is Outcome.CANCELLED:
        return True
    is_over = trajectory.outcome is Outcome.DEADLINE and trajectory.limit_source in CUTTING_LIMITS
    return is_over and trajectory.reason not in (SINGLE, GROUP)
