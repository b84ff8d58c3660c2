"""Puts together what calls the reward functions of a runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from rollout.errors import ConfigError
from rollout.scheduling.reward_processes import RewardProcesses
from rollout.scheduling.reward_references import NamedReward, importable, named_reward
from rollout.scheduling.reward_signatures import (
    VerlReward,
    check_group_reward,
    check_reward,
    of_trajectory,
    takes_sandbox,
)
from rollout.scheduling.rewarding import Rewarding
from rollout.scheduling.rewards import GroupRewardFunction, RewardFunction, reward_of, rewards_of
from rollout.scheduling.scorers import LocalScorer, ProcessScorer

if TYPE_CHECKING:
    from rollout.chat.group import Group
    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.observe.event_stream import EventStream
    from rollout.observe.tally import Tally
    from rollout.scheduling.scorers import Scorer
    from rollout.types import Reward
    from rollout.worker_threads import WorkerThreads


@attrs.frozen
class GivenRewards:
    """The functions that a caller gave, as they are; `checked` looks at them.

    Attributes:
        single: Of a trajectory, or its name.
        group: Of a group, or its name.
    """

    single: RewardFunction | str | None = None
    group: GroupRewardFunction | str | None = None


@attrs.frozen
class RewardFunctions:
    """The functions, checked; None where there is none."""

    single: NamedReward | None
    group: NamedReward | None

    @property
    def needs_sandbox(self) -> bool:
        """Whether trajectories are rewarded by a look into their sandboxes."""
        return self.single is not None and takes_sandbox(self.single.function)


def checked(given: GivenRewards, processes: int) -> RewardFunctions:
    """The functions, once they are known to be callable where they are to be called.

    Args:
        given: What the caller gave.
        processes: `rewards.processes`.

    Raises:
        ConfigError: One cannot be called with a trajectory or a group, there is none of its name,
            or no process could import it.
    """
    single = None if given.single is None else named_reward(given.single, "reward")
    group = None if given.group is None else named_reward(given.group, "group_reward")
    if single is not None:
        check_reward(single.function)
    if group is not None:
        check_group_reward(group.function)
    if processes and single is not None and takes_sandbox(single.function):
        raise ConfigError(
            f"reward: it names sandbox, which cannot leave this process; expected "
            f"rewards.processes = 0, not {processes}"
        )
    for what, each in (("reward", single), ("group_reward", group)):
        if processes and each is not None:
            importable(each, what, processes)
    return RewardFunctions(single, group)


def reward_processes(
    config: RolloutConfig, functions: RewardFunctions, threads: WorkerThreads
) -> RewardProcesses | None:
    """The pool that the configuration asks for, if any; the caller closes it."""
    count = config.rewards.processes
    named = (("reward", functions.single), ("group_reward", functions.group))
    refs = [importable(each, what, count) for what, each in named if each is not None and count]
    if not refs:
        return None
    cleanup_s = config.limits.cleanup_s
    return RewardProcesses(refs, threads, max_processes=count, cleanup_s=cleanup_s)


def make_rewarding(
    config: RolloutConfig,
    functions: RewardFunctions,
    processes: RewardProcesses | None,
    tokenizer: Any,
    threads: WorkerThreads,
    tally: Tally,
    events: EventStream,
) -> Rewarding:
    """What asks the functions for rewards, in the processes where there are any."""
    single: Scorer[Trajectory, Reward] | None = None
    group: Scorer[Group, list[Reward | None]] | None = None
    count = config.rewards.processes
    if functions.single is not None:
        function = of_trajectory(functions.single.function, tokenizer)
        needs_sandbox = takes_sandbox(functions.single.function)
        single = LocalScorer(function, "reward", reward_of, threads, takes_sandbox=needs_sandbox)
        if processes is not None:
            keywords = function.keywords if isinstance(function, VerlReward) else None
            ref = importable(functions.single, "reward", count)
            single = ProcessScorer(ref, processes, keywords)
    if functions.group is not None:
        group = LocalScorer(functions.group.function, "group_reward", rewards_of, threads)
        if processes is not None:
            group = ProcessScorer(importable(functions.group, "group_reward", count), processes)
    return Rewarding(
        single=single,
        group=group,
        limit_s=config.limits.reward_s,
        retries=config.rewards.retries,
        backoff_s=config.rewards.backoff_s,
        tally=tally,
        events=events,
    )
