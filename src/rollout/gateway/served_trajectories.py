"""Trajectories whose agents run elsewhere: opened, finished and read by the trainer."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import attrs
import msgspec

from rollout.agents import AgentLoop, register_agent
from rollout.agents.services import GatewayAddress
from rollout.chat.reward_values import MAX_REWARD, BadRewardError, apply_reward, check_reward_value
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
#: Reason of trajectories whose client left before it had the answer that names them.
CLIENT_LEFT = "client_left"
#: Of an ended trajectory in memory: what comes with each token, its text too, and all else.
TOKEN_BYTES, OTHER_BYTES = 40, 4096

_SAMPLING_FIELD = re.compile(r"\bsampling\.\w+")

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
RewardValue = Annotated[float, msgspec.Meta(ge=-MAX_REWARD, le=MAX_REWARD)]


class LimitsBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of one trajectory, within those of the configuration."""

    trajectory_s: Seconds | None = None
    max_calls: Count | None = None
    max_branches: Count | None = None
    max_concurrent_calls: Count | None = None


class PromptBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What of a `rollout.Prompt` counts where its reward comes from outside."""

    messages: Sequence[Mapping[str, Any]]
    uid: str | None = None
    sampling: Mapping[str, Any] = {}
    priority: int = 0


class OpenBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /trajectories``."""

    prompt: PromptBody
    limits: LimitsBody = msgspec.field(default_factory=LimitsBody)
    step: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None


class FinishBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /trajectories/{id}/finish``: the fields of a `rollout.Reward`.

    Rows are counted from 0; values of tokens or turns alone are those of the main row.
    """

    reward: RewardValue | None = None
    token_values: list[float] | dict[int, list[float]] | None = None
    turn_values: list[float] | dict[int, list[float]] | None = None
    segment_values: dict[int, float] = {}

    def apply(self, trajectory: Trajectory) -> None:
        """Reward a trajectory that may have a reward.

        Raises:
            GatewayError: A part of it does not fit the trajectory, which then gets nothing.
        """
        if self.reward is None:
            if (self.token_values, self.turn_values, self.segment_values) != (None, None, {}):
                message = "reward: expected a number beside others"
                raise GatewayError(400, "invalid_request", message, "reward")
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
class ServedTrajectory:
    """A trajectory, from its opening until it is forgotten.

    Attributes:
        id: Signed by its server.
        limits: Those that it was opened with.
        opened, finished, ended: Set when its agent can be reached, when the trainer finishes it,
            and when it has its outcome; the first and the last also where it never ran.
        scope: Ends its call, also before the call has begun.
        is_rewarded: Whether a finish has decided on its reward.
        address: Where its agent finds the model, once it runs.
        trajectory: Once it has ended.
        fault: Why it never ran.
    """

    id: str
    limits: LimitsBody
    opened: anyio.Event = attrs.field(factory=anyio.Event)
    finished: anyio.Event = attrs.field(factory=anyio.Event)
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    is_rewarded: bool = False
    address: GatewayAddress | None = None
    trajectory: Trajectory | None = None
    fault: Exception | None = None

    @property
    def size(self) -> int:
        """About how many bytes it takes, once it has ended."""
        if self.trajectory is None:
            return 0
        transcripts = self.trajectory.transcripts
        media = {each.medium.digest: each.medium for row in transcripts for each in row.media}
        content = sum(len(medium.content) for medium in media.values())
        for row in transcripts:
            experts = row.routed_experts()
            content += 0 if experts is None else experts.nbytes
            content += sum(8 * span.top[0] * len(span) for span in row.spans if span.top)
        return OTHER_BYTES + TOKEN_BYTES * sum(map(len, transcripts)) + content


#: Those that run, by their prompts' uids: a prompt itself holds only what a journal can.
_RUNNING: dict[str, ServedTrajectory] = {}


@register_agent(AGENT)
class ServedElsewhere(AgentLoop):
    """Opens the gateway to its trajectory, and waits until somebody finishes it."""

    _may_run_again = False  # its client would not come again

    async def run(self, context: AgentContext) -> None:
        """Wait for the finish, no longer than its opening allows."""
        served = _RUNNING[context.identity.uid]
        limits = msgspec.to_builtins(served.limits)
        seconds = limits.pop("trajectory_s", None)
        gateway: Any = context.gateway
        async with gateway.open(context, **limits) as served.address:
            served.opened.set()
            with anyio.move_on_after(seconds) as scope:
                await served.finished.wait()
        if scope.cancelled_caught:
            context.end(Outcome.DEADLINE, "trajectory", limit_source="limits.trajectory_s")


class TrajectoryServer:
    """Opens and finishes trajectories of a runtime; its methods run on the runtime's loop.

    They raise a `GatewayError` where there is no such trajectory.

    Args:
        runtime: Where they run.
        tasks: Holds their calls.
    """

    def __init__(self, runtime: RolloutRuntime, tasks: TaskGroup) -> None:
        self._runtime = runtime
        self._tasks = tasks
        self._secret = secrets.token_bytes(16)
        #: Those that have ended stand in the order in which they did.
        self._served: dict[str, ServedTrajectory] = {}

    def make_id(self) -> str:
        """Names a new trajectory; nobody guesses it, and it is known after it is forgotten."""
        number = secrets.token_hex(8)
        return f"trajectory-{number}{self._sign(number)}"

    async def open(self, served_id: str, body: OpenBody) -> dict[str, Any]:
        """A trajectory whose agent may begin. Cancellation abandons it.

        Args:
            served_id: A new one, of `make_id`.
            body: What is to be opened.

        Raises:
            GatewayError: The prompt is none, or the trajectory ended before.
        """
        served = ServedTrajectory(id=served_id, limits=body.limits)
        self._served[served.id] = served
        self._tasks.start_soon(self._run, served, body)
        try:
            await served.opened.wait()
        except BaseException:
            self.abandon(served_id)
            raise
        address = served.address
        if address is None:
            self._served.pop(served_id, None)
            raise _refuse_opening(served)
        names = ("base_url", "root_url", "api_key", "model")
        return {"id": served.id} | {name: getattr(address, name) for name in names}

    async def finish(self, served_id: str, body: FinishBody) -> dict[str, Any]:
        """End a trajectory, with its reward; its state then. Again it changes nothing.

        Raises:
            GatewayError: There is none; or the reward does not fit it, and may be sent again.
        """
        served = self._get(served_id)
        served.finished.set()
        await served.ended.wait()
        if not served.is_rewarded and served.trajectory is not None and served.trajectory.trainable:
            body.apply(served.trajectory)
        served.is_rewarded = True
        return _format_state(served)

    async def read_state(self, served_id: str) -> dict[str, Any]:
        """How a trajectory stands."""
        return _format_state(self._get(served_id))

    async def read_rows(self, served_id: str) -> dict[str, Any]:
        """A trajectory that has ended, with its rows of training data."""
        served = self._get(served_id)
        trajectory = served.trajectory
        if trajectory is None:
            raise GatewayError(400, "running", "the trajectory still runs; finish it first")
        rows = [_format_row(trajectory, segment) for segment in trajectory.segments]
        return _format_state(served) | {"rows": rows}

    async def forget(self, served_id: str) -> dict[str, Any]:
        """Cancel a trajectory that runs, and drop what there is of it."""
        if self._get(served_id).trajectory is None:
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

    async def _run(self, served: ServedTrajectory, body: OpenBody) -> None:
        prompt_body = body.prompt
        _RUNNING[served.id] = served
        try:
            with served.scope:
                prompt = Prompt(  # by its id: clients' names may repeat
                    messages=prompt_body.messages,
                    uid=served.id,
                    agent_name=AGENT,
                    sampling=prompt_body.sampling,
                    priority=prompt_body.priority,
                )
                async with self._runtime.stream([prompt], samples=1, step=body.step) as ended:
                    async for trajectory in ended:
                        served.trajectory = _strip(trajectory, prompt_body.uid)
        except Exception as error:
            served.fault = error
        finally:
            del _RUNNING[served.id]
            served.opened.set()
            served.ended.set()
            if served.id in self._served:
                self._served[served.id] = self._served.pop(served.id)
                self._forget_old()

    def _forget_old(self) -> None:
        """Keep those that ended last, as many as there is memory for, and the last one."""
        ended = [each for each in self._served.values() if each.trajectory is not None]
        size = sum(each.size for each in ended)
        for each in ended[:-1]:
            if size <= self._runtime.config.gateway.max_ended_bytes:
                break
            size -= each.size
            del self._served[each.id]

    def _get(self, served_id: str) -> ServedTrajectory:
        served = self._served.get(served_id)
        if served is not None:
            return served
        number = served_id.removeprefix("trajectory-")
        if hmac.compare_digest(number[16:].encode(), self._sign(number[:16]).encode()):
            message = f"the trajectory {served_id} was deleted, or forgotten for others"
            raise GatewayError(410, "gone", message)
        raise GatewayError(404, "not_found", f"no trajectory {served_id!r:.80}")

    def _sign(self, number: str) -> str:
        return hmac.digest(self._secret, number.encode(), "sha256").hex()[:16]


def _strip(trajectory: Trajectory, uid: str | None) -> Trajectory:
    """A trajectory under the name that its trainer knows, without messages: rows are tokens."""
    trajectory.uid = trajectory.uid if uid is None else uid
    trajectory.messages, trajectory.prompt = (), None  # type: ignore[assignment]
    for segment in trajectory.segments:
        segment.messages = ()
    return trajectory


def _refuse_opening(served: ServedTrajectory) -> GatewayError:
    """Why a trajectory never ran."""
    if isinstance(served.fault, PromptError):
        return GatewayError(400, "invalid_request", str(served.fault), "prompt")
    trajectory = served.trajectory
    if trajectory is None:
        return GatewayError(500, "engine", f"the trajectory did not start: {served.fault}")
    cause = "" if trajectory.cause is None else trajectory.cause.message
    if trajectory.outcome is Outcome.REJECTED and cause:
        field = "prompt.messages" if trajectory.reason == "empty_prompt" else "prompt"
        if trajectory.reason == "bad_sampling":
            named = _SAMPLING_FIELD.search(cause)
            field = f"prompt.{named[0]}" if named else "prompt.sampling"
        return GatewayError(400, "invalid_request", f"{field}: {cause}", field)
    why = f"the trajectory ended at once: {trajectory.outcome} ({trajectory.reason})"
    return GatewayError(400, "trajectory_ended", f"{why}: {cause}" if cause else why)


def _format_state(served: ServedTrajectory) -> dict[str, Any]:
    trajectory = served.trajectory
    if trajectory is None:
        return {"id": served.id, "state": "running"}
    names = ("uid", "outcome", "reason", "limit_source", "cause", "trainable", "reward", "metrics")
    values = {name: getattr(trajectory, name) for name in names}
    return {"id": served.id, "state": "ended", **values}


def _format_row(trajectory: Trajectory, segment: Segment) -> dict[str, Any]:
    transcript, parent, rewards = segment.transcript, segment.parent, segment.token_rewards
    return {
        "purpose": segment.purpose,
        "parent": None if parent is None else {"row": parent[0], "position": parent[1]},
        "trainable": trajectory.is_trainable(segment) and transcript.generated_length > 0,
        "reward": trajectory.reward_of(segment),
        "token_rewards": None
        if rewards is None
        else [0.0] * transcript.prompt_length + list(rewards),
        "prompt_length": transcript.prompt_length,
        "ids": transcript.ids().tolist(),
        "mask": transcript.mask().astype(int).tolist(),
        "log_probs": transcript.log_probs().tolist(),
        "weight_versions": transcript.weight_versions().tolist(),
    }
