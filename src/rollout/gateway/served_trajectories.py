"""Trajectories whose agents run elsewhere: opened, finished and read by the trainer."""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakValueDictionary

import anyio
import attrs
import msgspec

from rollout.agents import AgentLoop, register_agent
from rollout.agents.gateway_door import GatewayAddress
from rollout.chat.reward_values import BadRewardError, apply_reward, check_reward_value
from rollout.chat.trajectory import Trajectory
from rollout.errors import PromptError
from rollout.gateway.calls import GatewayError
from rollout.types import Outcome, Prompt, Reward

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from rollout.agents import AgentContext
    from rollout.chat.trajectory import Segment
    from rollout.runtime.runtime import RolloutRuntime

#: Registered name of the agent that waits for its trajectory to be finished.
AGENT = "served_elsewhere"
#: Finished trajectories that are kept to be read; the oldest are forgotten.
MAX_KEPT = 4096
#: Reason of trajectories whose client left before it had the answer that names them.
CLIENT_LEFT = "client_left"
#: Greatest number of float32.
MAX_REWARD = 3.4e38

_SAMPLING_FIELD = re.compile(r"\bsampling\.\w+")

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
RewardValue = Annotated[float, msgspec.Meta(ge=-MAX_REWARD, le=MAX_REWARD)]


class AskedLimits(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of one trajectory, within those of the configuration."""

    trajectory_s: Seconds | None = None
    max_calls: Count | None = None
    max_branches: Count | None = None
    max_concurrent_calls: Count | None = None


class AskedPrompt(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What of a `rollout.Prompt` counts where its reward is given from outside."""

    messages: Sequence[Mapping[str, Any]]
    uid: str | None = None
    sampling: Mapping[str, Any] = {}
    priority: int = 0


class Opening(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /trajectories``."""

    prompt: AskedPrompt
    limits: AskedLimits = msgspec.field(default_factory=AskedLimits)
    step: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None


class Finish(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /trajectories/{id}/finish``: what a `rollout.Reward` says.

    Rows are counted from 0; values of tokens or turns alone are those of the main row.
    """

    reward: RewardValue | None = None
    token_values: list[float] | dict[int, list[float]] | None = None
    turn_values: list[float] | dict[int, list[float]] | None = None
    segment_values: dict[int, float] = {}

    def give(self, trajectory: Trajectory) -> None:
        """Give it to a trajectory that may have one.

        Raises:
            GatewayError: A part of it does not fit the trajectory, which then gets nothing.
        """
        if self.reward is None:
            if (self.token_values, self.turn_values, self.segment_values) != (None, None, {}):
                raise GatewayError(
                    400, "invalid_request", "reward: expected a number beside others", "reward"
                )
            return
        reward = Reward(
            value=self.reward,
            token_values=self.token_values,
            turn_values=self.turn_values,
            segment_values=self.segment_values,
        )
        try:
            apply_reward(trajectory, check_reward_value(reward, trajectory, "the trainer"))
        except BadRewardError as error:
            raise GatewayError(400, "invalid_request", str(error), error.field) from None


@attrs.define(eq=False, kw_only=True)
class Served:
    """A trajectory, from its opening until it is forgotten.

    Attributes:
        scope: Ends its call, also before the call has begun.
        is_judged: Whether a finish has decided on its reward.
        address: Where its agent finds the model, once it runs.
        trajectory: Once it has ended.
        fault: Why it never ran.
    """

    id: str
    limits: AskedLimits
    opened: anyio.Event = attrs.field(factory=anyio.Event)
    finished: anyio.Event = attrs.field(factory=anyio.Event)
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    is_judged: bool = False
    address: GatewayAddress | None = None
    trajectory: Trajectory | None = None
    fault: Exception | None = None


#: By their prompts' uids: a prompt itself holds only what a journal can.
_SERVED: WeakValueDictionary[str, Served] = WeakValueDictionary()


@register_agent(AGENT)
class ServedElsewhere(AgentLoop):
    """Opens the gateway to its trajectory, and waits until somebody finishes it."""

    async def run(self, context: AgentContext) -> None:
        """Wait for the finish, no longer than was asked for."""
        served = _SERVED[context.identity.uid]
        asked = msgspec.to_builtins(served.limits)
        seconds = asked.pop("trajectory_s", None)
        door: Any = context.door
        async with door.open(context, **asked) as served.address:
            served.opened.set()
            with anyio.move_on_after(seconds) as scope:
                await served.finished.wait()
        if scope.cancelled_caught:
            context.end(Outcome.DEADLINE, "trajectory", limit_source="limits.trajectory_s")


class Desk:
    """Opens and finishes trajectories of a runtime; its methods run on the runtime's loop."""

    def __init__(self, runtime: RolloutRuntime, tasks: TaskGroup) -> None:
        self._runtime = runtime
        self._tasks = tasks
        self._served: OrderedDict[str, Served] = OrderedDict()

    async def open(self, served_id: str, asked: Opening) -> dict[str, Any]:
        """A trajectory whose agent may begin. Cancellation abandons it.

        Args:
            served_id: A new one, of `new_id`.

        Raises:
            GatewayError: The prompt is none, or the trajectory ended before.
        """
        served = Served(id=served_id, limits=asked.limits)
        self._forget_old()
        self._served[served.id] = _SERVED[served.id] = served
        self._tasks.start_soon(self._run, served, asked)
        try:
            await served.opened.wait()
        except BaseException:
            self.abandon(served_id)
            raise
        if served.address is None:
            self._served.pop(served_id, None)
            raise _never_ran(served)
        address = served.address
        return {
            "id": served.id,
            "base_url": address.base_url,
            "root_url": address.root_url,
            "api_key": address.api_key,
            "model": address.model,
        }

    async def finish(self, served_id: str, asked: Finish) -> dict[str, Any]:
        """End a trajectory, with its reward; what it is then. Again it changes nothing.

        Raises:
            GatewayError: There is none; or the reward does not fit it, and may be given again.
        """
        served = self._of(served_id)
        served.finished.set()
        await served.ended.wait()
        if not served.is_judged and served.trajectory is not None and served.trajectory.trainable:
            asked.give(served.trajectory)
        served.is_judged = True
        return self.state(served_id)

    def state(self, served_id: str) -> dict[str, Any]:
        """How a trajectory stands.

        Raises:
            GatewayError: There is none.
        """
        served = self._of(served_id)
        trajectory = served.trajectory
        if trajectory is None:
            return {"id": served_id, "state": "running"}
        return {
            "id": served_id,
            "state": "ended",
            "uid": trajectory.uid,
            "outcome": trajectory.outcome,
            "reason": trajectory.reason,
            "limit_source": trajectory.limit_source,
            "cause": trajectory.cause,
            "trainable": trajectory.trainable,
            "reward": trajectory.reward,
            "metrics": trajectory.metrics,
        }

    def rows(self, served_id: str) -> dict[str, Any]:
        """A trajectory that has ended, with its rows of training data.

        Raises:
            GatewayError: There is none, or it still runs.
        """
        trajectory = self._of(served_id).trajectory
        if trajectory is None:
            raise GatewayError(400, "running", "the trajectory still runs; finish it first")
        rows = [_row(trajectory, segment) for segment in trajectory.segments]
        return self.state(served_id) | {"rows": rows}

    def forget(self, served_id: str) -> dict[str, Any]:
        """Cancel a trajectory that runs, and drop what there is of it.

        Raises:
            GatewayError: There is none.
        """
        served = self._of(served_id)
        if served.trajectory is None:
            self._runtime.cancel(uid=served_id, reason="forgotten")
        del self._served[served_id]
        return {"id": served_id, "state": "forgotten"}

    def abandon(self, served_id: str) -> None:
        """End and drop a trajectory whose client never learned of it; nothing where there is none.

        It may wait for its place, run, or not be a member of any call yet.
        """
        served = self._served.pop(served_id, None)
        if served is None or served.ended.is_set():
            return
        if not self._runtime.cancel(uid=served_id, reason=CLIENT_LEFT):
            served.scope.cancel()

    async def _run(self, served: Served, asked: Opening) -> None:
        try:
            with served.scope:
                prompt = _prompt(served, asked.prompt)
                async with self._runtime.stream([prompt], samples=1, step=asked.step) as ended:
                    async for served.trajectory in ended:
                        _name(served.trajectory, asked.prompt)
        except Exception as error:
            served.fault = error
        finally:
            served.opened.set()
            served.ended.set()

    def _of(self, served_id: str) -> Served:
        try:
            return self._served[served_id]
        except KeyError:
            raise GatewayError(404, "not_found", f"no trajectory {served_id!r:.80}") from None

    def _forget_old(self) -> None:
        ended = [each for each in self._served.values() if each.ended.is_set()]
        for each in ended[: len(ended) + 1 - MAX_KEPT]:
            del self._served[each.id]


def new_id() -> str:
    """Names a trajectory; nobody guesses it."""
    return f"trajectory-{secrets.token_hex(12)}"


def _prompt(served: Served, asked: AskedPrompt) -> Prompt:
    """The prompt of a trajectory, which the runtime knows by its id: clients' names may repeat."""
    return Prompt(
        messages=asked.messages,
        uid=served.id,
        agent_name=AGENT,
        sampling=asked.sampling,
        priority=asked.priority,
    )


def _name(trajectory: Trajectory, asked: AskedPrompt) -> None:
    """Give it the name that its trainer knows."""
    trajectory.uid = asked.uid if asked.uid is not None else trajectory.uid


def _never_ran(served: Served) -> GatewayError:
    if isinstance(served.fault, PromptError):
        return GatewayError(400, "invalid_request", str(served.fault), "prompt")
    trajectory = served.trajectory
    if trajectory is not None:
        if trajectory.outcome is Outcome.REJECTED and trajectory.cause is not None:
            message = trajectory.cause.message
            field = _field_at_fault(trajectory.reason, message)
            return GatewayError(400, "invalid_request", f"{field}: {message}", field)
        cause = f": {trajectory.cause.message}" if trajectory.cause is not None else ""
        why = f"the trajectory ended at once: {trajectory.outcome} ({trajectory.reason}){cause}"
        return GatewayError(400, "trajectory_ended", why)
    return GatewayError(500, "engine", f"the trajectory did not start: {served.fault}")


def _field_at_fault(reason: str, message: str) -> str:
    """What of the body made a prompt that is rejected."""
    if reason == "bad_sampling":
        named = _SAMPLING_FIELD.search(message)
        return f"prompt.{named[0]}" if named else "prompt.sampling"
    return "prompt.messages" if reason == "empty_prompt" else "prompt"


def _row(trajectory: Trajectory, segment: Segment) -> dict[str, Any]:
    transcript = segment.transcript
    parent, token_rewards = segment.parent, segment.token_rewards
    return {
        "purpose": segment.purpose,
        "parent": None if parent is None else {"row": parent[0], "position": parent[1]},
        "trainable": trajectory.is_trainable(segment),
        "reward": trajectory.reward if segment.reward is None else segment.reward,
        "token_rewards": None
        if token_rewards is None
        else [0.0] * transcript.prompt_length + list(token_rewards),
        "prompt_length": transcript.prompt_length,
        "ids": transcript.ids().tolist(),
        "mask": transcript.mask().astype(int).tolist(),
        "log_probs": transcript.log_probs().tolist(),
        "weight_versions": transcript.weight_versions().tolist(),
    }
