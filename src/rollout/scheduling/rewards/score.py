"""Calls reward functions for trajectories and groups, within their limits, with retries."""

from __future__ import annotations

import copy
import inspect
import logging
from functools import partial
from typing import TYPE_CHECKING

import anyio
import msgspec

from rollout.agents.ending import Ending
from rollout.agents.trajectory_state import UNRESPONSIVE
from rollout.chat.reward_values import GROUP_REWARD, REWARD, apply_reward, check_rewards
from rollout.chat.trajectory import Group
from rollout.child_processes import ChildRaisedError
from rollout.containment import Contained
from rollout.limits import Deadline
from rollout.observe.event_stream import NO_TRAJECTORY
from rollout.observe.events import RewardEnded
from rollout.scheduling.endings import describe_cause, end_without_reward, exclude
from rollout.scheduling.rewards.functions import SANDBOX
from rollout.scopes import find_exception
from rollout.types import Cause, Outcome, Reward

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.agents.services import Services
    from rollout.chat.trajectory import Trajectory
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.scheduling.members import Member
    from rollout.scheduling.rewards.functions import LoadedReward
    from rollout.scheduling.rewards.processes import RewardProcesses

logger = logging.getLogger("rollout.scheduling")

#: Pauses between retries double up to this.
MAX_PAUSE_S = 30.0
LIMIT = "limits.reward_s"


class RewardCall:
    """A call of a reward function, with its retries; it ends once nobody waits for it.

    It is for a trajectory, or for the wanted members of a group. Those that are not trainable stand
    in the group, and get no reward. Where none is learned, the outcome of the others says why.

    Args:
        services: Have the threads, the limits and the tokenizer with which it is called.
        ended: The trajectory, or those of the group.
        sandbox: Of the trajectory, for a function that names it.

    Attributes:
        members: Those that it is to reward.
        since: When it was made, on the loop's clock.
        tokens: None: it samples none.
    """

    tokens = None

    def __init__(
        self,
        services: Services,
        function: LoadedReward,
        ended: Mapping[Member, Trajectory],
        sandbox: TrajectorySandbox | None = None,
    ) -> None:
        _end_cancelled(ended)
        self.since, self.is_group = anyio.current_time(), function.is_group
        self.members = [member for member, each in ended.items() if each.trainable]
        self._services, self._function = services, function
        self._ended, self._sandbox = ended, sandbox
        who = next(iter(ended)).identity
        of_whom = f"the group {who.uid}" if self.is_group else f"trajectory {who.uid}/{who.member}"
        self._what = f"reward of {of_whom}"
        self._who = GROUP_REWARD if self.is_group else REWARD
        self._code: Contained[list[Reward | None]]
        self._deadline: Deadline | None = None  # once the function is called

    @property
    def _is_over(self) -> bool:
        """Whether nobody waits for it: the members were cancelled, or their time is over."""
        return all(member.is_ending for member in self.members)

    def cancel(self) -> None:
        """One of the members is cancelled, or its time is over."""
        if self._is_over:
            self._code.cancel()

    async def run(self) -> None:
        """Give its rewards, or why there are none, to those trainable; retry where that helps.

        Raises:
            KeyboardInterrupt: Ctrl-C reached the function.
        """
        if not self.members:
            return
        answer = self._explain_cancelled() if self._is_over else await self._ask()
        if self.is_group:
            _end_cancelled(self._ended)
        failure = answer if isinstance(answer, Ending) else None
        rewards = [None] * len(self._ended) if isinstance(answer, Ending) else answer
        for trajectory, reward in zip(self._ended.values(), rewards, strict=True):
            if not trajectory.trainable:
                continue
            if reward is not None:
                apply_reward(trajectory, reward)
            elif failure is None or failure.limit_source == (trajectory.limit_source or ""):
                exclude(trajectory)  # the group has none for it; or that limit has ended its agent
            else:
                end_without_reward(trajectory, failure)
            trajectory.metrics[f"{self._function.what}_s"] = anyio.current_time() - self.since
        events, first = self._services.events, self.members[0]
        if events.is_on:
            event = RewardEnded(
                at=events.now(),
                trajectory=NO_TRAJECTORY if self.is_group else first.identity.number,
                batch=first.batch,
                group=first.identity.group,
                began=events.since_start(self.since),
                reward=None if self.is_group else self._ended[first].reward,
                error="" if failure is None else describe_cause(failure),
            )
            events.tell_event(event.trajectory, event)

    async def _ask(self) -> list[Reward | None] | Ending:
        """Return the rewards of all trajectories, or why there are none."""
        settings, pause_s, retries = self._services.config.rewards, 0.0, 0
        while True:
            answer = await self._attempt(pause_s)
            if not isinstance(answer, Ending):
                return answer
            has_failed = answer.outcome is Outcome.FAILED and answer.reason != UNRESPONSIVE
            may_pass = has_failed or answer.limit_source == LIMIT
            if not may_pass or self._is_over or retries == settings.retries:
                return answer
            logger.info("%s: asked again (%s)", self._what, describe_cause(answer))
            pause_s = min(2 * pause_s or settings.backoff_s, MAX_PAUSE_S)
            retries += 1

    async def _attempt(self, pause_s: float) -> list[Reward | None] | Ending:
        """Call the function contained, after a pause."""
        self._deadline = None
        code = self._code = Contained(self._services.containment, self._who, activity=self._what)
        for member in self.members:
            member.set_running(self)
        try:
            rewards = await code.run(partial(self._call, pause_s))
        finally:
            if code.unresponsive is not None:  # trajectories may have been cancelled, or be carried
                self._services.tally.unresponsive += 1
                logger.warning("%s: %s", self._what, code.unresponsive)
            for member in self.members:
                member.running = None
        if code.unresponsive is not None:
            return Ending.fail(UNRESPONSIVE, code.unresponsive)
        raised = code.error
        if raised is None:
            if rewards is None or code.scope.cancel_called:
                return self._explain_cancelled()
            return rewards
        interrupt = find_exception(raised, KeyboardInterrupt)
        if interrupt is not None:
            raise interrupt
        cause = raised.cause if isinstance(raised, ChildRaisedError) else Cause.of(raised)
        return Ending(outcome=Outcome.FAILED, reason=self._function.what, cause=cause)

    async def _call(self, pause_s: float) -> list[Reward | None]:
        if pause_s:
            await anyio.sleep(pause_s)
        function, begin, threads = self._function, self._begin, self._services.threads
        subject, tokenizer = self._copy_subject(), self._services.template.tokenizer
        if function.processes is not None:
            processes: RewardProcesses = function.processes
            return await processes.score(function, subject, tokenizer, begin)
        if function.runs_in_thread:
            call = function.call_in_thread
            value = await threads.run(function.what, call, subject, tokenizer, begin=begin)
        else:
            begin()
            named = {} if self._sandbox is None else {SANDBOX: self._sandbox}
            value = function.function(subject, **named)
        return check_rewards(await value if inspect.isawaitable(value) else value, subject)

    def _copy_subject(self) -> Trajectory | Group:
        """Copy what is judged: nobody sees what a function assigns to it, or to its metrics."""
        copies = [
            msgspec.structs.replace(
                trajectory,
                segments=list(map(copy.copy, trajectory.segments)),
                metrics=dict(trajectory.metrics),
            )
            for trajectory in self._ended.values()
        ]
        if not self.is_group:
            return copies[0]
        first = next(iter(self._ended))
        return Group(uid=first.identity.uid, prompt=first.prompt, trajectories=tuple(copies))

    def _begin(self) -> None:
        """The function is called: its time begins, or begins again."""
        self._deadline = Deadline.after(self._services.config.limits.reward_s, LIMIT)
        self._code.scope.deadline = self._deadline.at

    def _explain_cancelled(self) -> Ending:
        first = self.members[0].cancel_reason
        if first is not None and all(each.cancel_reason is not None for each in self.members):
            return Ending(outcome=Outcome.CANCELLED, reason=first)
        met = (member.deadline_met for member in self.members)
        deadline = next((each for each in met if each is not None), self._deadline)
        assert deadline is not None  # nothing else cancels it
        if self._deadline is None:
            state = "had not been called"
        elif self._function.processes is not None:
            state = "had not returned; its process was killed, and another one takes its place"
        elif self._function.runs_in_thread:
            state = "had not returned; its thread is left behind"
        else:
            state = "had not returned"
        error = deadline.error()
        cause = Cause(type=type(error).__qualname__, message=f"{error}: {self._who} {state}")
        return Ending(
            outcome=Outcome.DEADLINE,
            reason=self._function.what,
            limit_source=deadline.source,
            cause=cause,
        )


def _end_cancelled(ended: Mapping[Member, Trajectory]) -> None:
    """End those that were cancelled while they waited for their reward."""
    for member, trajectory in ended.items():
        if member.cancel_reason is not None and trajectory.trainable:
            ending = Ending(outcome=Outcome.CANCELLED, reason=member.cancel_reason)
            end_without_reward(trajectory, ending)
