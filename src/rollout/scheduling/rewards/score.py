"""Calls reward functions for trajectories and groups, within their limits, with retries."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import attrs
import msgspec

from rollout.agents.services import Services
from rollout.agents.trajectory_state import UNRESPONSIVE
from rollout.chat.reward_values import (
    GROUP_REWARD,
    REWARD,
    apply_reward,
    check_group_values,
    check_reward_value,
)
from rollout.chat.trajectory import Group
from rollout.child_processes import ChildRaisedError
from rollout.containment import Contained, UnresponsiveError
from rollout.limits import Deadline
from rollout.scheduling.endings import end_without_reward, exclude
from rollout.scheduling.rewards.functions import GROUP, SINGLE, LoadedReward, RewardFunctions
from rollout.scheduling.rewards.processes import RewardProcesses
from rollout.scheduling.trajectory_events import emit_rewarded
from rollout.scopes import find_exception
from rollout.types import Cause, Outcome, Reward

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.scheduling.member_group import Ended, Member

logger = logging.getLogger("rollout.scheduling")

#: Pauses between retries double up to this.
MAX_PAUSE_S = 30.0
LIMIT = "limits.reward_s"
#: Reasons of trajectories whose reward is not known.
REWARD_REASON, GROUP_REWARD_REASON = SINGLE, GROUP


@attrs.frozen
class RewardFailure:
    """Why a reward is not known: what becomes of the trajectory."""

    outcome: Outcome
    reason: str
    source: str | None = None
    cause: Cause | None = None

    @property
    def may_pass(self) -> bool:
        """Whether another call may do better."""
        has_failed = self.outcome is Outcome.FAILED and self.reason != UNRESPONSIVE
        return has_failed or self.source == LIMIT

    def __str__(self) -> str:
        cause = self.cause
        return self.reason if cause is None else f"{cause.type}: {cause.message}"


@attrs.frozen
class Rewarding:
    """The reward functions of a runtime.

    Attributes:
        services: Have the threads, the limits and the tokenizer with which they are called.
        functions: Of a trajectory and of a group.
        processes: Where both run in place of this process; None: they run here.
    """

    services: Services
    functions: RewardFunctions
    processes: RewardProcesses | None = None

    async def reward(
        self, member: Member, trajectory: Trajectory, get_sandbox: Callable[[], TrajectorySandbox]
    ) -> None:
        """Call the function of a trajectory; where no reward is learned, its outcome says why.

        Args:
            member: Whose trajectory it is.
            get_sandbox: Gives the trajectory's, for a function that names it.
        """
        function = self.functions.single
        assert function is not None
        what = f"reward of trajectory {trajectory.uid}/{trajectory.member}"
        call = RewardCall(self, function, [member], what)
        sandbox = get_sandbox() if function.takes_sandbox else None
        reward = await call.run(partial(_copy, trajectory), sandbox)
        self._give(call, [trajectory], [reward])

    async def reward_group(self, ended: Sequence[Ended]) -> None:
        """Call the function of a group for its wanted members.

        Those that are not trainable stand in the group, and get no reward. Where none is learned,
        the outcome of the others says why.
        """
        function = self.functions.group
        assert function is not None
        _end_cancelled(ended)
        members = [each.member for each in ended if each.trajectory.trainable]
        if members:
            what = f"reward of the group {ended[0].trajectory.uid}"
            call = RewardCall(self, function, members, what)
            rewards = await call.run(partial(_copy_group, ended))
            _end_cancelled(ended)
            if isinstance(rewards, RewardFailure):
                rewards = [rewards] * len(ended)
            self._give(call, [each.trajectory for each in ended], rewards)

    def _give(
        self,
        call: RewardCall,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[Reward | RewardFailure | None],
    ) -> None:
        """Apply rewards, or their failures, to those that are trainable.

        None: the group's function has no reward for this member.
        """
        for trajectory, reward in zip(trajectories, rewards, strict=True):
            if not trajectory.trainable:
                continue
            match reward:
                case RewardFailure(source=str(source)) if source == trajectory.limit_source:
                    exclude(trajectory)  # that limit has ended its agent already
                case RewardFailure(outcome, reason, source, cause):
                    end_without_reward(trajectory, outcome, reason, source, cause)
                case None:
                    exclude(trajectory)
                case _:
                    apply_reward(trajectory, reward)
            trajectory.metrics[f"{call.function.what}_s"] = anyio.current_time() - call.since
        if self.services.events.is_on:
            failure = next((str(each) for each in rewards if isinstance(each, RewardFailure)), "")
            emit_rewarded(
                self.services.events,
                call.members[0],
                call.since,
                None if call.is_group else trajectories[0].reward,
                failure,
                is_group=call.is_group,
            )


class RewardCall:
    """A call of a reward function, with its retries; it ends once nobody waits for it.

    Args:
        members: Those that it is to reward.
        what: Whose reward it is, for messages.

    Attributes:
        since: When it was made, on the loop's clock.
        tokens: None: it samples none.
    """

    tokens = None

    def __init__(
        self, rewarding: Rewarding, function: LoadedReward, members: Sequence[Member], what: str
    ) -> None:
        self.since = anyio.current_time()
        self.function, self.members, self.is_group = function, members, function.what == GROUP
        self._services, self._processes = rewarding.services, rewarding.processes
        self._what, self._who = what, GROUP_REWARD if self.is_group else REWARD
        self._code: Contained[Any]
        self._deadline: Deadline | None = None  # once the function is called

    @property
    def _is_over(self) -> bool:
        """Whether nobody waits for it: the members were cancelled, or their time is over."""
        return all(member.is_ending for member in self.members)

    def cancel(self) -> None:
        """One of the members is cancelled, or its time is over."""
        if self._is_over:
            self._code.cancel()

    async def run(
        self,
        make_subject: Callable[[], Trajectory | Group],
        sandbox: TrajectorySandbox | None = None,
    ) -> Any:
        """Return the function's answer, checked, or a `RewardFailure`; retry where that helps.

        Raises:
            KeyboardInterrupt: Ctrl-C reached the function.
        """
        settings, pause_s, retries = self._services.config.rewards, 0.0, 0
        if self._is_over:
            return self._explain_cancelled()
        while True:
            answer = await self._attempt(partial(self._call, make_subject, sandbox, pause_s))
            if not isinstance(answer, RewardFailure):
                return answer
            self._services.tally.unresponsive += answer.reason == UNRESPONSIVE
            if not answer.may_pass or self._is_over or retries == settings.retries:
                return answer
            logger.info("%s: asked again (%s)", self._what, answer)
            pause_s = min(2 * pause_s or settings.backoff_s, MAX_PAUSE_S)
            retries += 1

    async def _attempt(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Run `call` contained, and return its answer, or a `RewardFailure`."""
        self._deadline = None
        containment = self._services.containment
        code = self._code = Contained[Any](containment, self._who, activity=self._what)
        for member in self.members:
            member.set_running(self)
        try:
            value = await code.run(call)
        except UnresponsiveError as error:
            return RewardFailure(Outcome.FAILED, UNRESPONSIVE, cause=Cause.of(error))
        finally:
            for member in self.members:
                member.running = None
        raised = code.error
        if raised is None:
            return self._explain_cancelled() if code.scope.cancel_called else value
        interrupt = find_exception(raised, KeyboardInterrupt)
        if interrupt is not None:
            raise interrupt
        cause = raised.cause if isinstance(raised, ChildRaisedError) else Cause.of(raised)
        return RewardFailure(Outcome.FAILED, self.function.what, cause=cause)

    async def _call(
        self,
        make_subject: Callable[[], Trajectory | Group],
        sandbox: TrajectorySandbox | None,
        pause_s: float,
    ) -> Any:
        if pause_s:
            await anyio.sleep(pause_s)
        subject, tokenizer = make_subject(), self._services.template.tokenizer
        if self._processes is not None:
            return await self._processes.score(self.function, subject, tokenizer, self._begin)
        threads = self._services.threads
        value = await self.function.call(subject, self._begin, threads, tokenizer, sandbox)
        if isinstance(subject, Group):
            return check_group_values(value, subject)
        return check_reward_value(value, subject)

    def _begin(self) -> None:
        """The function is called: its time begins, or begins again."""
        self._deadline = Deadline.after(self._services.config.limits.reward_s, LIMIT)
        self._code.scope.deadline = self._deadline.at

    def _explain_cancelled(self) -> RewardFailure:
        if all(member.cancel_reason is not None for member in self.members):
            return RewardFailure(Outcome.CANCELLED, self.members[0].cancel_reason or "")
        met = (member.deadline_met for member in self.members)
        deadline = next((each for each in met if each is not None), self._deadline)
        assert deadline is not None  # nothing else cancels it
        if self._deadline is None:
            state = "had not been called"
        elif self._processes is not None:
            state = "had not returned; its process was killed, and another one takes its place"
        elif self.function.runs_in_thread:
            state = "had not returned; its thread is left behind"
        else:
            state = "had not returned"
        error = deadline.error()
        cause = Cause(type=type(error).__qualname__, message=f"{error}: {self._who} {state}")
        return RewardFailure(Outcome.DEADLINE, self.function.what, deadline.source, cause)


def _copy(trajectory: Trajectory) -> Trajectory:
    """A copy: nobody sees what a function assigns to it, or puts into its metrics."""
    return msgspec.structs.replace(
        trajectory,
        segments=list(map(copy.copy, trajectory.segments)),
        metrics=dict(trajectory.metrics),
    )


def _copy_group(ended: Sequence[Ended]) -> Group:
    first = ended[0].member
    trajectories = tuple(_copy(each.trajectory) for each in ended)
    return Group(uid=first.identity.uid, prompt=first.prompt, trajectories=trajectories)


def _end_cancelled(ended: Sequence[Ended]) -> None:
    """End those that were cancelled while they waited for their reward."""
    for member, trajectory in ended:
        if member.cancel_reason is not None and trajectory.trainable:
            end_without_reward(trajectory, Outcome.CANCELLED, member.cancel_reason, None, None)
