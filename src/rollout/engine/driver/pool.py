"""The engines of a rollout: replicas kept alive, requests placed, answers gathered."""

from __future__ import annotations

import itertools
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from rollout.engine.driver.load_windows import LoadWindows
from rollout.engine.driver.maintenance_queue import MaintenanceQueue
from rollout.engine.driver.memory_manager import MemoryManager
from rollout.engine.driver.pool_maintenance import PoolMaintenance
from rollout.engine.driver.recovery import (
    Attempt,
    RecoveryCounts,
    RecoveryPolicy,
    RecoveryRules,
)
from rollout.engine.driver.replica import Replica
from rollout.engine.driver.replica_statistics import ReplicaStatistics, statistics_of
from rollout.engine.driver.replica_supervisor import Supervisor, nothing_known
from rollout.engine.driver.replica_transitions import ReplicaTransitions
from rollout.engine.driver.request_runner import LAST_ANSWER_S, RequestRunner
from rollout.engine.driver.request_waits import waits_of
from rollout.engine.driver.sampling_faults import check_sampling
from rollout.engine.driver.token_ids import check_ids
from rollout.engine.driver.wait_queue import Notifier, WaitQueue
from rollout.engine.driver.weight_updater import WeightUpdater
from rollout.errors import EngineError
from rollout.limits import Clock
from rollout.observe.event_stream import NO_TRAJECTORY, EventStream
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from anyio.abc import TaskGroup

    from rollout.engine.core import EngineInfo, EngineLoad, SamplingParams
    from rollout.engine.driver.generation import Generation
    from rollout.engine.driver.replica_supervisor import FactsGiver
    from rollout.engine.placement.placement import CoreSpec, Placement
    from rollout.engine.routing import Router
    from rollout.engine.wire.protocol import Terms
    from rollout.limits import Limit
    from rollout.medium import PlacedMedia
    from rollout.observe.explanation import Wait
    from rollout.token_prefix import TokenPrefix


class EnginePool(PoolMaintenance):
    """Replicas behind a router, one for each of `specs`; made by `open_engines`.

    Args:
        load_shares: Shares of the load, one for each of `specs`; empty makes all equal.
        spec_of: What a replica that is added runs, by its slot; None: what the first does.
        policy: What becomes of requests whose replica is lost.
        wait_s: How long requests wait for a replica once none serves; None never ends it.
        backoff_s: Pause before a replica that died is restarted; doubled each time.
        terms: Of the channels; None takes the defaults.
        facts: Gives what the driver takes for granted of the engines, which may refuse it.
        last_answer_s: How long a cancelled request waits for the tokens of its last answer.
        events: Takes what happens to those who want to know.

    Attributes:
        recoveries: What was done about requests whose replica was lost.
        load_windows: What the engines say that they are doing, for batches.
        stop: Has the requests of carried trajectories cut off; see `RequestRunner.stop`.
    """

    def __init__(
        self,
        *,
        placement: Placement,
        specs: Sequence[CoreSpec],
        router: Router,
        start_timeout_s: float,
        load_shares: Sequence[float] = (),
        spec_of: Callable[[int], CoreSpec] | None = None,
        policy: RecoveryPolicy = "resume",
        wait_s: float | None = 300.0,
        backoff_s: float = 1.0,
        terms: Terms | None = None,
        facts: FactsGiver | None = None,
        last_answer_s: float = LAST_ANSWER_S,
        events: EventStream | None = None,
    ) -> None:
        self.events = EventStream() if events is None else events
        self._router = router
        self._policy = policy
        self._rules: RecoveryRules | None = None  # known with the facts of the engines
        self._spec_of = spec_of or (lambda _: specs[0])
        self._replicas: dict[str, Replica] = {}
        self._numbers = itertools.count()
        shares = load_shares or (1.0,) * len(specs)
        for spec, share in zip(specs, shares, strict=True):
            self._new_replica(spec, share)
        self._wait_queue = WaitQueue(
            lambda: router.has_room and not self._requests.is_admission_blocked
        )
        self._changes = Notifier()
        self._requests = RequestRunner(
            router,
            self._replicas,
            self._wait_queue,
            self._changes,
            last_answer_s,
            self.events,
        )
        self.stop = self._requests.stop
        self._maintenance = MaintenanceQueue()
        self._weight_updater = WeightUpdater(
            router,
            self._requests,
            self._replicas.values(),
            limit_s=start_timeout_s,
            changed=self._wait_queue.wake_next,
            changes=self._changes,
        )
        self._memory_manager = MemoryManager(
            self._requests,
            self._replicas.values(),
            changed=self._wait_queue.wake_next,
            limit_s=start_timeout_s,
        )
        self.load_windows = LoadWindows(self._replicas)
        self._transitions = ReplicaTransitions(
            router,
            self._replicas,
            self._requests,
            self._weight_updater,
            self._memory_manager,
            self._wait_queue,
            self._changes,
            wait_s=math.inf if wait_s is None else wait_s,
            events=self.events,
            load_windows=self.load_windows,
        )
        self._supervisor = Supervisor(
            terms=terms,
            facts=facts or nothing_known,
            placement=placement,
            start_timeout_s=start_timeout_s,
            backoff_s=backoff_s,
            bring_up=self._transitions.bring_up,
            classify_loss=self._transitions.classify_loss,
            taken_down=self._transitions.taken_down,
        )
        self._tasks: TaskGroup | None = None
        self.recoveries = RecoveryCounts()

    @property
    def info(self) -> EngineInfo:
        """The facts that all replicas share."""
        if self._transitions.info is None:
            raise EngineError("no engine has started yet")
        return self._transitions.info

    def media_fault(self, kind: str) -> str:
        """Why no engine takes media of this kind, "image" or "video"; empty where they do."""
        return self.info.media_fault((kind,))

    @property
    def weight_version(self) -> int:
        """Of the weights that every engine has now; while they change, of those before."""
        return self._weight_updater.version_after(self.info.weight_version)

    @property
    def router(self) -> Router:
        """Decides where requests go; its `statistics` say why."""
        return self._router

    def statistics(self) -> tuple[ReplicaStatistics, ...]:
        """A snapshot of every replica, those removed included."""
        return tuple(map(statistics_of, self._replicas.values()))

    def loads(self) -> dict[str, EngineLoad]:
        """What each serving engine last said it was doing, by replica."""
        return {r.name: r.channel.load for r in self._replicas.values() if r.channel is not None}

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for a place on a replica."""
        return len(self._wait_queue)

    @property
    def tokens_under_way(self) -> int:
        """Tokens that have arrived for generations that have not ended."""
        return sum(attempt.generation.count for attempt in self._requests.active)

    def waits(self, now: float) -> dict[str, list[Wait]]:
        """What each generation waits for, by the trajectory's part of its session."""
        return waits_of(self._requests.active, now)

    def paused_s(self) -> float:
        """Seconds for which the runtime has let all work wait so far, which `batch_s` counts."""
        return self._requests.paused_s()

    def drain(self, name: str) -> None:
        """Send a replica nothing new until `resume`, also restarted; what is in flight continues.

        Raises:
            EngineError: There is no such replica.
        """
        replica = self._find(name)
        replica.drain()
        if replica.routed is not None:
            self._router.drain(name)

    def resume(self, name: str) -> None:
        """End `drain`.

        Raises:
            EngineError: There is no such replica.
        """
        replica = self._find(name)
        replica.resume()
        if replica.routed is not None:
            self._router.resume(name)
            self._wait_queue.wake_next()

    async def add_replica(self, *, load_share: float = 1.0) -> str:
        """Start one more replica, with the current weights; its name, once it serves.

        Cancellation leaves nothing of it.

        Raises:
            EngineError: It did not start.
        """
        if self._tasks is None:
            raise EngineError("the engines are closed")
        replica = self._new_replica(None, load_share)
        try:
            await self._tasks.start(self._supervisor.supervise, replica)
        except RuntimeError:  # it ended, without an error of its own, before it served
            why = "it was removed" if replica.is_leaving else "the engines were closed"
            raise EngineError(f"{replica.name}: {why} while it started") from None
        finally:
            if replica.starts == 0:
                del self._replicas[replica.name]
        return replica.name

    async def remove_replica(self, name: str, *, drain_s: float | None = None) -> None:
        """End a replica; returns when nothing of it is left.

        It gets nothing new, and what it has in flight may end within `drain_s` (None: without a
        limit); what is left then resumes elsewhere, as after a loss. Cancelled while it drains,
        the replica stays.

        Raises:
            EngineError: There is no such replica.
        """
        replica = self._find(name)
        was_drained = replica.is_drained
        self.drain(name)
        try:
            with anyio.move_on_after(math.inf if drain_s is None else drain_s):
                while replica.routed is not None and replica.routed.in_flight:
                    await self._changes.wait()
        except BaseException:
            if not was_drained and not replica.is_leaving:
                self.resume(name)
            raise
        replica.remove()
        await replica.gone.wait()

    def _find(self, name: str) -> Replica:
        replica = self._replicas.get(name)
        if replica is None or replica.is_leaving:
            raise EngineError(f"there is no replica {name!r}")
        return replica

    def _new_replica(self, spec: CoreSpec | None, load_share: float) -> Replica:
        taken = {each.spec.slot for each in self._replicas.values() if not each.gone.is_set()}
        slot = next(slot for slot in itertools.count() if slot not in taken)
        spec = attrs.evolve(spec or self._spec_of(slot), slot=slot)
        name = f"engine-{next(self._numbers)}"
        replica = Replica(name, spec, load_share, events=self.events)
        self._replicas[replica.name] = replica
        return replica

    def generate(
        self,
        generation: Generation,
        *,
        session_id: str,
        prompt_ids: bytes | TokenPrefix,
        sampling: SamplingParams,
        like: SamplingParams | None = None,
        priority: int = 0,
        known_experts: int = 0,
        group_id: str = "",
        limit: Limit | None = None,
        trajectory: int = NO_TRAJECTORY,
        media: Sequence[PlacedMedia] = (),
    ) -> Coroutine[Any, Any, None]:
        """Run one request to its end, awaited; `generation` fills as tokens come.

        Where its replica is lost it resumes elsewhere, as the policy says. Cancellation keeps in
        `generation` what had arrived, and has the engine end the request.

        Args:
            session_id: The trajectory; its requests stay on one replica while that serves well.
            prompt_ids: int32 little-endian, packed; or the trajectory's prefix, of which only
                what the replica does not have is sent.
            like: What `sampling` differs from in its budget, its seed and its stops only. That
                thousands share it is why the attempt holds it, in the place of `sampling`.
            priority: Larger is served first, here and in the engine.
            known_experts: Tokens of the prompt whose routed experts the caller has already.
            group_id: Trajectories that begin with the same prompt; "" for one on its own.
            limit: The generation's, which engines keep too; the caller awaits it within. It stands
                still while the runtime lets the request wait.
            trajectory: Its number in the run's events.
            media: Those in the prompt, in order; a replica is sent each once, while it has it.

        Raises:
            EngineError: The request is refused for good, the engine failed it, replicas died of
                it, or no engine is left; `reason` says which.
        """
        info = self.info
        check_ids(prompt_ids, info.vocab_size)
        check_sampling(sampling)
        fault = info.media_fault(each.medium.kind for each in media) if media else ""
        if fault:
            raise EngineError(fault)
        if self._rules is None:
            self._rules = RecoveryRules(self._policy, info, self.recoveries)
        generation.top_count = sampling.top_log_probs
        generation.expert_shape = info.capabilities.expert_shape
        attempt = Attempt(
            generation=generation,
            session_id=session_id,
            prompt=prompt_ids,
            like=like or sampling,
            max_new_tokens=sampling.max_new_tokens,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            rules=self._rules,
            priority=priority,
            group_id=group_id,
            known_experts=known_experts,
            limit=limit or Clock(),
            trajectory=trajectory,
            media=tuple(media),
        )
        if info.capabilities.expert_shape is not None:
            generation.expert_room = attempt.prompt_tokens - known_experts
        return self._requests.run(attempt)

    def forget(self, session_id: str) -> None:
        """The trajectory has ended; nothing is kept for it."""
        self._router.forget(session_id)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep every replica, all of them serving first; none is left afterwards.

        Raises:
            EngineError: One of them did not start, with what it said.
        """
        try:
            async with open_task_group() as tasks:
                self._tasks, self._requests.is_open = tasks, True
                self._maintenance.open(tasks)
                try:
                    await self._supervisor.start_all(tasks, self._replicas.values())
                    yield
                finally:
                    self._tasks, self._requests.is_open = None, False
                    self._maintenance.close()
                    self._wait_queue.wake_all()
        finally:
            await self._weight_updater.aclose()


@asynccontextmanager
async def open_pool(pool: EnginePool) -> AsyncIterator[EnginePool]:
    """The pool with all of its replicas serving; they are gone when the block has been left."""
    async with pool.serving():
        yield pool
