"""A runtime that records what its callers ask for and what they get."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

import anyio
from anyio.abc import ObjectReceiveStream

from harness.call_records import CallRecord, GenerationRecord, name_of
from rollout.chat.trajectory import Trajectory
from rollout.config import SimulatedEngine
from rollout.engine.cores.simulated.options import parse_scenario
from rollout.engine.weights import DiskWeights
from rollout.errors import PromptError, RolloutError
from rollout.worker_threads import is_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from harness.watched_core import WatchedCore
    from harness.watched_tools import Use
    from rollout.batch import RolloutBatch
    from rollout.chat.trajectory import Group
    from rollout.config import RolloutConfig
    from rollout.runtime.measuring import RuntimeStatistics
    from rollout.runtime.runtime import RolloutRuntime
    from rollout.scheduling.rewards.functions import GroupRewardFunction, RewardFunction
    from rollout.types import Prompt

#: Seconds in which whatever was ended must be gone, beside what the scenario itself delays.
PATIENCE_S = 10.0
#: Seconds between two looks at whether all is quiet.
_LOOK_S = 0.25
#: What a call on a closed runtime raises; nothing was started then.
_IS_CLOSED = "the runtime is closed"

#: How long a replica is drained, and how long one that is removed may take to end its requests.
_DRAINED_S = 0.5

#: The call that the running task works for: members inherit it from their caller.
_call: ContextVar[CallRecord | None] = ContextVar("call", default=None)
_new_versions = itertools.count(1000)


def _list_serving(runtime: RolloutRuntime) -> list[str]:
    return [r.name for r in runtime.engines.statistics() if r.state == "serving"]


async def _drain_first(runtime: RolloutRuntime) -> None:
    for name in _list_serving(runtime)[:1]:
        runtime.engines.drain(name)
        try:
            await anyio.sleep(_DRAINED_S)
        finally:
            runtime.engines.resume(name)


async def _add(runtime: RolloutRuntime) -> None:
    await runtime.engines.add_replica()


async def _remove_last(runtime: RolloutRuntime) -> None:
    """Remove the last replica, unless it is the only one."""
    for name in _list_serving(runtime)[1:][-1:]:
        await runtime.engines.remove_replica(name, drain_s=_DRAINED_S)


async def _update(runtime: RolloutRuntime) -> None:
    await runtime.update_weights(version=next(_new_versions), source=DiskWeights("."))


#: What may be done to the replicas of a runtime while it works.
OPERATIONS: Mapping[str, Callable[[RolloutRuntime], Awaitable[None]]] = {
    "replica_drain": _drain_first,
    "replica_add": _add,
    "replica_remove": _remove_last,
    "new_weights": _update,
}


class WatchedRuntime:
    """A `RolloutRuntime` with records; made by `Recorder.open_rollout`.

    Everything that is not here is the runtime's own.

    Attributes:
        calls: Its calls so far.
        cores: Its engines, those that have ended included.
        reasons: Reasons given to `cancel`.
        rewarded: Trajectories that the reward function was asked about.
        rewarded_in_groups: Those that the one of groups was.
        has_reward: Whether there is either.
        run_seed: What all seeds derive from.
        statistics_before: A snapshot from when the records begin; None: they begin at the start.
        statistics_at_end: A snapshot after the calls had ended and all was quiet, or after the
            runtime had closed where it did not get to that.
        is_settled: Whether it was quiet then.
        places_held: Places in `scheduling.max_in_flight` that were taken at that moment.
        forgotten: Sessions that the engines were told to forget.
        closed_in_s: What closing took; None while it is open.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.calls: list[CallRecord] = []
        self.cores: list[WatchedCore] = []
        self.reasons: set[str] = set()
        self.rewarded: list[Trajectory] = []
        self.rewarded_in_groups: list[Trajectory] = []
        self.has_reward = False
        assert config.seed is not None
        self.run_seed = config.seed
        self.statistics_before: RuntimeStatistics | None = None
        self.statistics_at_end: RuntimeStatistics | None = None
        self.is_settled = False
        self.places_held = 0
        self.forgotten: set[str] = set()
        self.closed_in_s: float | None = None
        self._steps = itertools.count()
        self._operations: list[str] = []
        self._operation_requested = anyio.Event()
        self._runtime: RolloutRuntime | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int | None = None,
        step: int | None = None,
        validate: bool = False,
        **options: Any,
    ) -> RolloutBatch:
        """See `Runtime.generate`."""
        with self._record("generate", prompts, samples, step, validate=validate) as call:
            call.layout = options.get("layout", call.layout)
            call.trim = options.get("trim", call.trim)
            call.batch = await self._real.generate(
                prompts, samples=samples, step=call.step, validate=validate, **options
            )
            call.is_complete = True
            return call.batch

    @asynccontextmanager
    async def stream(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int | None = None,
        step: int | None = None,
        validate: bool = False,
    ) -> AsyncIterator[ObjectReceiveStream[Trajectory]]:
        """See `Runtime.stream`."""
        with self._record("stream", prompts, samples, step, validate=validate) as call:
            async with self._real.stream(
                prompts, samples=samples, step=call.step, validate=validate
            ) as stream:
                yield _WatchedStream(stream, call)

    async def collect(
        self, source: Any, groups: int, *, step: int | None = None, **options: Any
    ) -> RolloutBatch:
        """See `Runtime.collect`."""
        with self._record("collect", (), None, step) as call:
            call.groups = groups
            self._note_policy(call, options)
            call.batch = await self._real.collect(source, groups, step=call.step, **options)
            call.is_complete = True
            return call.batch

    @asynccontextmanager
    async def stream_groups(
        self, source: Any, *, step: int | None = None, **options: Any
    ) -> AsyncIterator[AsyncIterator[Group]]:
        """See `Runtime.stream_groups`."""
        with self._record("stream_groups", (), None, step) as call:
            self._note_policy(call, options)
            async with self._real.stream_groups(source, step=call.step, **options) as groups:
                yield _WatchedGroups(groups, call)

    def _note_policy(self, call: CallRecord, options: dict[str, Any]) -> None:
        scheduling = self.config.scheduling
        given = options.get("policy") or scheduling.groups
        policy = given.over(scheduling.groups)
        call.wanted_members = policy.members or scheduling.samples_per_prompt
        call.may_carry = policy.surplus == "carry"

    def cancel(
        self, uid: str | None = None, member: int | None = None, *, reason: str = "cancelled"
    ) -> int:
        """See `Runtime.cancel`."""
        self.reasons.add(reason)
        for call in self.calls if uid is None and member is None else ():
            call.stopped_at = call.stopped_at or anyio.current_time()
        return self._real.cancel(uid, member, reason=reason)

    def cancel_if_open(self, reason: str) -> None:
        """Cancel every trajectory there is, if any."""
        if self._runtime is not None:
            self.cancel(reason=reason)

    def request_operation(self, kind: str) -> None:
        """Have something done to the replicas, beside its usual work: see `OPERATIONS`."""
        self._operations.append(kind)
        self._operation_requested.set()

    async def operate(self) -> None:
        """Carry out what is requested, until cancelled."""
        while True:
            await self._operation_requested.wait()
            self._operation_requested = anyio.Event()
            while self._operations:
                with suppress(RolloutError):  # it is closing, or the replica is gone
                    await OPERATIONS[self._operations.pop()](self._real)

    async def settle(self) -> None:
        """Wait, shielded and with bounded patience, until no request is under way any more.

        Returns at once where a call still runs.
        """
        if any(call.ended is None for call in self.calls):
            return
        with anyio.CancelScope(shield=True):
            give_up = anyio.current_time() + patience_s(self.config)
            while not self._is_quiet() and anyio.current_time() < give_up:
                await anyio.sleep(_LOOK_S)
            await anyio.sleep(_LOOK_S)  # what is on its way in memory arrives meanwhile
        self.is_settled = True
        self._note_end()

    def forget(self) -> None:
        """Drop the records, once they have been checked; for runs too long to keep them."""
        self.statistics_before = self._real.statistics()
        self.is_settled = False
        self.calls.clear()
        self.rewarded.clear()
        self.rewarded_in_groups.clear()
        self.forgotten.clear()
        self.cores[:] = [core for core in self.cores if not core.is_gone]
        for core in self.cores:
            core.requests.clear()

    def record_use(self, uid: str, member: int, use: Use) -> None:
        """Note that a trajectory of the current call has opened a tool or met a user."""
        call = _call.get()
        if call is not None:
            call.uses[uid, member].append(use)

    def watch_reward(self, reward: RewardFunction | None) -> Any:
        """The reward function, with its trajectories recorded; as sync or async as it was."""
        return self._watch(reward, self.rewarded.append)

    def watch_group_reward(self, reward: GroupRewardFunction | None) -> Any:
        """The same of a function of groups."""
        return self._watch(reward, lambda group: self.rewarded_in_groups.extend(group.trajectories))

    def _watch(self, reward: Any, record: Callable[[Any], None]) -> Any:
        if reward is None:
            return None
        self.has_reward = True

        async def watched_async(scored: Any) -> Any:
            record(scored)
            return await reward(scored)

        def watched(scored: Any) -> Any:
            record(scored)
            return reward(scored)

        return watched_async if is_async(reward) else watched

    def record_generation(self, session_id: str, record: GenerationRecord) -> None:
        """Note what a trajectory of the current call asks of the engines."""
        call = _call.get()
        if call is not None:
            call.generations[session_id].append(record)

    def attach(self, runtime: RolloutRuntime) -> None:
        """Watch this runtime."""
        self._runtime = runtime

    def closed(self, in_s: float) -> None:
        """Note that the runtime is closed, and how long that took."""
        self.closed_in_s = in_s
        if not self.is_settled:
            self._note_end()

    @property
    def _real(self) -> RolloutRuntime:
        runtime: RolloutRuntime | None = self.__dict__["_runtime"]
        assert runtime is not None
        return runtime

    def _note_end(self) -> None:
        self.statistics_at_end = self._real.statistics()
        self.places_held = self._real.admission.limiter.borrowed_tokens

    def _is_quiet(self) -> bool:
        replicas = self._real.statistics().replicas
        is_idle = all(r.in_flight == 0 and r.zombies == 0 for r in replicas)
        return is_idle and not any(
            sent.is_open for core in self.cores for sent in core.requests.values()
        )

    @contextmanager
    def _record(
        self,
        kind: str,
        prompts: Sequence[Prompt],
        samples: int | None,
        step: int | None,
        *,
        validate: bool = False,
    ) -> Iterator[CallRecord]:
        call = CallRecord(
            kind=kind,
            prompts=prompts,
            step=next(self._steps) if step is None else step,
            samples=samples or self.config.scheduling.samples_of(validate=validate),
            is_validation=validate,
            started=anyio.current_time(),
        )
        self.calls.append(call)
        outer = _call.get()
        _call.set(call)
        try:
            yield call
        except BaseException as error:
            call.failure = name_of(error)
            call.is_refused = isinstance(error, PromptError) or str(error) == _IS_CLOSED
            if isinstance(error, RolloutError) and kind in ("generate", "collect"):
                call.batch = cast("RolloutBatch | None", error.partial)
            raise
        finally:
            call.ended = anyio.current_time()
            _call.set(outer)


class _WatchedStream(ObjectReceiveStream[Trajectory]):
    def __init__(self, stream: ObjectReceiveStream[Trajectory], call: CallRecord) -> None:
        self._stream = stream
        self._call = call

    async def receive(self) -> Trajectory:
        try:
            trajectory = await self._stream.receive()
        except anyio.EndOfStream:
            self._call.is_complete = True
            raise
        self._call.received.append(trajectory)
        return trajectory

    async def aclose(self) -> None:
        await self._stream.aclose()


class _WatchedGroups:
    def __init__(self, groups: AsyncIterator[Group], call: CallRecord) -> None:
        self._groups = groups
        self._call = call

    def __aiter__(self) -> _WatchedGroups:
        return self

    async def __anext__(self) -> Group:
        try:
            group = await anext(self._groups)
        except StopAsyncIteration:
            self._call.is_complete = True
            raise
        self._call.received += group.trajectories
        return group


def patience_s(config: RolloutConfig) -> float:
    """Seconds in which everything that was ended must be gone, whatever the scenario delays."""
    if not isinstance(config.engine, SimulatedEngine):
        return PATIENCE_S
    faults = parse_scenario(config.engine.scenario).faults
    return PATIENCE_S + faults.lost_aborts + (faults.freeze_s or 0.0)
