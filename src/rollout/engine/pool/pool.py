"""The engines of a rollout: replicas that are kept alive, behind one router."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import attrs
import msgspec

from rollout.engine.channel.channel import watch_silence
from rollout.engine.channel.framing import Notifier
from rollout.engine.channel.messages import ChannelSettings, ClientExpectations
from rollout.engine.core import ALL_TAGS, TAGS_OF_LEVEL, Capabilities
from rollout.engine.cores.checks import check_ids
from rollout.engine.pool.memory import MemoryManager, check_level, check_tags
from rollout.engine.pool.replica import (
    LoadWindow,
    Replica,
    ReplicaSettings,
    ReplicaStatistics,
)
from rollout.engine.pool.request_runner import LAST_ANSWER_S, RecoveryPolicy, RequestRunner
from rollout.engine.pool.weight_update import WeightUpdater, check_update
from rollout.errors import EngineError
from rollout.observe.event_stream import EventStream
from rollout.observe.events import MemoryChanged, WeightsUpdated
from rollout.scopes import open_task_group
from rollout.types import format_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence

    from anyio.abc import TaskGroup

    from rollout.engine.channel.channel import Channel
    from rollout.engine.core import EngineInfo, EngineLoad
    from rollout.engine.placement.placement import CoreSpec, Placement
    from rollout.engine.pool.generation import Generation
    from rollout.engine.routing import Router
    from rollout.engine.weights import UpdateMode, WeightSource
    from rollout.limits import Clock
    from rollout.observe.events import Event
    from rollout.observe.explanation import Wait

logger = logging.getLogger("rollout.engine")

#: Handshakes with engines that run at once.
MAX_CONNECTING = 32

ExpectationsGiver = Callable[[], Awaitable[ClientExpectations]]


async def expect_nothing() -> ClientExpectations:
    """The expectations of a driver that assumes nothing about the model."""
    return ClientExpectations()


class EnginePool:
    """Replicas behind a router, one for each of `specs`; made by `open_engines`.

    Args:
        load_shares: Shares of the load, one for each of `specs`; empty makes all equal.
        make_spec: What a replica that is added runs, by its slot; None: what the first does.
        min_replicas: How many must serve before the pool is open; None: all.
        policy: What becomes of requests whose replica is lost.
        wait_s: How long requests wait for a replica once none serves; None never ends it.
        backoff_s: Pause before a lost replica is restarted; doubled each time.
        settings: Of the channels; None takes the defaults.
        expectations: Gives what the driver assumes about the model, which engines may refuse.
        last_answer_s: How long a cancelled request waits for the tokens of its last answer.
        events: Takes what happens.

    Attributes:
        router: Decides where requests go; its `statistics` say why.
        recoveries: What was done about requests whose replica was lost.
    """

    def __init__(
        self,
        *,
        placement: Placement,
        specs: Sequence[CoreSpec],
        router: Router,
        start_timeout_s: float,
        load_shares: Sequence[float] = (),
        make_spec: Callable[[int], CoreSpec] | None = None,
        min_replicas: int | None = None,
        policy: RecoveryPolicy = "resume",
        wait_s: float | None = 300.0,
        backoff_s: float = 1.0,
        settings: ChannelSettings | None = None,
        expectations: ExpectationsGiver = expect_nothing,
        last_answer_s: float = LAST_ANSWER_S,
        events: EventStream | None = None,
    ) -> None:
        self.events = EventStream() if events is None else events
        self.router = router
        self._wait_s = math.inf if wait_s is None else wait_s
        self._make_spec = make_spec or (lambda _: specs[0])
        self._min_replicas = len(specs) if min_replicas is None else min_replicas
        self._info: EngineInfo | None = None
        self._tasks: TaskGroup | None = None
        self._changes = Notifier()
        self._one_at_a_time = anyio.Lock()
        self._replicas: dict[str, Replica] = {}
        self._serving: dict[Replica, None] = {}
        self._numbers = itertools.count()
        self._settings = ReplicaSettings(
            placement=placement,
            router=router,
            channel=settings or ChannelSettings(),
            expectations=expectations,
            watched={},
            connecting=anyio.CapacityLimiter(MAX_CONNECTING),
            start_timeout_s=start_timeout_s,
            backoff_s=backoff_s,
            prepare=self._prepare,
            on_change=self._note_change,
            on_load=self._note_load,
            events=self.events,
        )
        self._requests = RequestRunner(router, self._replicas, policy, last_answer_s, self.events)
        self._weights = WeightUpdater(
            router,
            self._requests,
            self._replicas.values(),
            limit_s=start_timeout_s,
            changes=self._changes,
        )
        self._memory = MemoryManager(self._requests, self._replicas.values())
        self.recoveries = self._requests.counts
        self._load_windows: dict[LoadWindow, None] = {}
        for spec, share in zip(specs, load_shares or (1.0,) * len(specs), strict=True):
            self._make_replica(spec, share)

    # What is known of the engines.

    @property
    def info(self) -> EngineInfo:
        """The facts that all replicas share."""
        if self._info is None:
            raise EngineError("no engine has started yet")
        return self._info

    def media_fault(self, kind: str) -> str:
        """Why no engine takes media of this kind, "image" or "video"; empty where they do."""
        return self.info.media_fault((kind,))

    @property
    def weight_version(self) -> int:
        """Of the weights that every engine has now; while they change, of those before."""
        updated = self._weights.version
        return self.info.weight_version if updated is None else updated

    def statistics(self) -> tuple[ReplicaStatistics, ...]:
        """A snapshot of every replica, those removed included."""
        return tuple(replica.statistics() for replica in self._replicas.values())

    def loads(self) -> dict[str, EngineLoad]:
        """The last load report of each serving engine, by replica."""
        return {r.name: r.channel.load for r in self._replicas.values() if r.channel is not None}

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for a place on a replica."""
        return len(self._requests.queue)

    @property
    def tokens_under_way(self) -> int:
        """Tokens that have arrived for generations that have not ended."""
        return sum(request.count for request in self._requests.active)

    def waits(self, now: float) -> dict[str, list[Wait]]:
        """What each generation waits for, by the name of its trajectory's main conversation."""
        return self._requests.describe_waits(now)

    @contextmanager
    def load_window(self) -> Iterator[LoadWindow]:
        """Gather what the engines report while the block runs."""
        window = LoadWindow(self._replicas)
        self._load_windows[window] = None
        try:
            yield window
        finally:
            del self._load_windows[window]

    def paused_s(self) -> float:
        """Seconds for which the runtime has let all work wait so far, which `batch_s` counts."""
        return self._requests.paused_s()

    # Requests.

    def generate(self, generation: Generation) -> Awaitable[None]:
        """Run one generation to its end, as `Generation.ask` says; it fills as tokens come.

        Where its replica is lost it resumes elsewhere, as the policy says. Cancellation keeps in
        `generation` what had arrived, and has the engine end the request.

        Raises:
            EngineError: The request is refused for good, the engine failed it, too many engines
                were lost with it, or none is left; `reason` says which.
        """
        info, prompt, media = self.info, generation.prompt, generation.media
        if isinstance(prompt, bytes) or prompt.checked < prompt.length:
            check_ids(prompt, info.vocab_size)
        fault = info.media_fault(each.medium.kind for each in media) if media else ""
        if fault:
            raise EngineError(fault)
        generation.set_facts(info)
        return self._requests.run(generation)

    async def interrupt_carried(self, clocks: Collection[Clock]) -> None:
        """Cut off the requests of carried trajectories; returns when none is in flight."""
        await self._requests.interrupt_carried(clocks)

    def forget(self, session_id: str) -> None:
        """The trajectory has ended; nothing is kept for it."""
        self.router.forget(session_id)

    # Replicas.

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[EnginePool]:
        """Keep every replica, enough of them serving first; none is left afterwards.

        Raises:
            EngineError: Too many of them did not start, with what one said.
        """
        try:
            async with open_task_group() as tasks:
                self._tasks, self._requests.is_open = tasks, True
                tasks.start_soon(watch_silence, self._settings.watched, self._settings.channel)
                try:
                    for replica in self._replicas.values():
                        tasks.start_soon(replica.run)
                    await self._wait_for_enough()
                    yield self
                finally:
                    self._tasks = None
                    self.refuse_requests()
        finally:
            await self._weights.aclose()

    def refuse_requests(self) -> None:
        """Fail requests that wait for a replica, also those to come: the runtime is closing."""
        self._requests.is_open = False
        self._requests.queue.call_all()

    async def _wait_for_enough(self) -> None:
        """Return when `min_replicas` serve."""
        replicas = tuple(self._replicas.values())
        while len(self._serving) < self._min_replicas:
            failed = [each.start_error for each in replicas if each.start_error and not each.starts]
            if len(failed) > len(replicas) - self._min_replicas:
                raise failed[0]
            await self._changes.wait()

    async def add_replica(self, *, load_share: float = 1.0) -> str:
        """Start one more replica, with the current weights; its name, once it serves.

        Cancellation leaves nothing of it.

        Raises:
            EngineError: It did not start, or `load_share` is no number above 0.
        """
        if self._tasks is None:
            raise EngineError("the engines are closed")
        is_number = isinstance(load_share, int | float) and not isinstance(load_share, bool)
        if not (is_number and 0 < load_share < math.inf):
            raise EngineError(f"load_share = {load_share!r:.80}: expected a number > 0")
        replica = self._make_replica(None, load_share)
        self._tasks.start_soon(replica.run)
        why, is_serving = "the engines were closed", False
        try:
            await replica.tried.wait()
            is_serving = replica.starts > 0
            if replica.is_leaving:
                why = "it was removed"
        finally:
            if not is_serving:  # or its caller, who is cancelled, does not learn that it is
                replica.remove()
                with anyio.CancelScope(shield=True):
                    await replica.gone.wait()
                del self._replicas[replica.name]
        if not is_serving:
            raise replica.start_error or EngineError(f"{replica.name}: {why} while it started")
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
                await replica.wait_empty()
        except BaseException:
            if not was_drained and not replica.is_leaving:
                self.resume(name)
            raise
        replica.remove()
        await replica.gone.wait()

    def drain(self, name: str) -> None:
        """Send a replica nothing new until `resume`, also restarted; what is in flight continues.

        Raises:
            EngineError: There is no such replica.
        """
        replica = self._find(name)
        replica.is_drained = True
        if replica.is_serving:
            self.router.drain(name)

    def resume(self, name: str) -> None:
        """End `drain`; raises as that does."""
        replica = self._find(name)
        replica.is_drained = False
        if replica.is_serving:
            self.router.resume(name)
            self._requests.queue.call_next()

    def _find(self, name: str) -> Replica:
        replica = self._replicas.get(name)
        if replica is None or replica.is_leaving:
            raise EngineError(f"there is no replica {name!r}")
        return replica

    def _make_replica(self, spec: CoreSpec | None, load_share: float) -> Replica:
        taken = {each.spec.slot for each in self._replicas.values() if not each.gone.is_set()}
        slot = next(slot for slot in itertools.count() if slot not in taken)
        spec = attrs.evolve(spec or self._make_spec(slot), slot=slot)
        replica = Replica(f"engine-{next(self._numbers)}", spec, load_share, self._settings)
        self._replicas[replica.name] = replica
        return replica

    async def _prepare(self, replica: Replica, channel: Channel) -> None:
        """Check a connected replica, and give it the current weights, asleep as the others are."""
        found, shared = channel.info, self._info or channel.info
        if found.fingerprint != shared.fingerprint:
            raise EngineError(
                f"{replica.name} serves model {found.fingerprint}, the other engines "
                f"{shared.fingerprint}"
            )
        for name in Capabilities.__struct_fields__:
            able, others = (getattr(each.capabilities, name) for each in (found, shared))
            if able != others:
                raise EngineError(
                    f"{replica.name} has capabilities.{name} = {able!r}, the other engines "
                    f"{others!r}; expected the same of all"
                )
        length = min(found.context_length, shared.context_length)  # any may get any request
        self._info = msgspec.structs.replace(shared, context_length=length)
        while True:
            await self._weights.bring_up(replica, channel)
            await self._memory.bring_up(replica, channel)
            if replica.weights is self._weights.current:  # they may change while it goes to sleep
                return

    def _note_change(self, replica: Replica) -> None:
        """A replica came to serve, was lost, failed to start or ended."""
        if replica.is_serving:
            self._serving[replica] = None
            self._requests.queue.is_closed = False
            self._requests.queue.call_next()
        elif replica in self._serving:
            del self._serving[replica]
            if not self._serving and self._tasks is not None:
                self._tasks.start_soon(self._close_queue)
        self._changes.notify()

    async def _close_queue(self) -> None:
        """Send waiting requests away where no replica comes to serve within `wait_s`."""
        with anyio.move_on_after(self._wait_s):
            while not self._serving:
                await self._changes.wait()
        if not self._serving:
            self._requests.queue.is_closed = True
            self._requests.queue.call_all()

    def _note_load(self, replica: Replica, load: EngineLoad) -> None:
        if self.events.is_on or self._load_windows:
            sample = replica.sample(load)
            for window in self._load_windows:
                window.take(sample, self.waiting_requests)
            if self.events.is_on:
                self.events.emit(sample)

    # What changes all replicas, one change at a time.

    async def update_weights(
        self, version: int, source: WeightSource, mode: UpdateMode = "abort_and_resume"
    ) -> None:
        """Every replica has these weights afterwards; one that starts later gets them first.

        Replicas load them side by side, and get new requests when they have. One that cannot load
        them is restarted, unless none can. Cancellation leaves them to it.

        Args:
            mode: What becomes of the requests that a replica has in flight. "wait": they end
                first. "abort_and_resume": they are cut off, keep their tokens, and resume from
                those under the new weights. "in_place": they continue, with what was computed of
                them under the old weights.

        Raises:
            EngineError: An argument is wrong, or no replica could load them: the error of each.
                All have the weights that they had, those that broke once they have restarted.
        """
        version = check_update(version, source, mode)
        with self._emitting(partial(WeightsUpdated, version=version, mode=mode)):
            await self._run_alone(partial(self._weights.update, version, source, mode))

    async def sleep(self, level: int = 1) -> None:
        """Every replica has released memory afterwards; returns once it is free.

        Level 1 releases the KV cache, 2 the weights as well. Running requests are cut off and keep
        their tokens; they, and those that come, go on after `wake_up`. Replicas that start
        meanwhile sleep too.

        Raises:
            EngineError: An engine could not; all stay awake.
        """
        tags = TAGS_OF_LEVEL[(level := check_level(level))]
        with self._emitting(partial(MemoryChanged, action="sleep", tags=tags)):
            await self._run_alone(partial(self._memory.sleep, level))

    async def wake_up(self, tags: Iterable[str] = ALL_TAGS) -> None:
        """Take back what `sleep` released; requests resume once all of it is there.

        Weights are those that were current, or were loaded while the engines slept.

        Raises:
            EngineError: An engine could not; it is restarted.
        """
        tags = check_tags(tags)
        with self._emitting(partial(MemoryChanged, action="wake_up", tags=tags)):
            await self._run_alone(partial(self._memory.wake_up, tags))

    async def flush_cache(self) -> None:
        """Every replica forgets what it computed of earlier requests.

        Those that run are cut off, and then go on from the tokens that they have.

        Raises:
            EngineError: An engine could not.
        """
        await self._run_alone(self._memory.flush_cache)

    async def _run_alone(self, work: Callable[[], Awaitable[None]]) -> None:
        """Return when `work` is done, which the caller's cancellation does not stop.

        It runs in a task of the pool: a change of weights that is cut in half is none.
        """
        if self._tasks is None:
            raise EngineError("the engines are closed")
        done = anyio.Event()
        errors: list[Exception] = []

        async def run() -> None:
            try:
                async with self._one_at_a_time:
                    await work()
            except Exception as error:  # whatever it is, it is the caller's, and the engines stay
                errors.append(error)
                if is_left:
                    logger.error("an operation whose caller was cancelled failed: %s", error)
            except BaseException:
                errors.append(EngineError("the engines were closed meanwhile"))
                raise
            finally:
                done.set()

        is_left = False
        self._tasks.start_soon(run)
        try:
            await done.wait()
        except BaseException:
            is_left = True
            raise
        if errors:
            raise errors[0]

    @contextmanager
    def _emitting(self, make_event: Callable[..., Event]) -> Iterator[None]:
        """Emit an event once the block is left, with the error that left it."""
        began, error = self.events.now(), ""
        try:
            yield
        except BaseException as fault:
            error = format_error(fault)
            raise
        finally:
            if self.events.is_on:
                self.events.emit(make_event(at=self.events.now(), began=began, error=error))
