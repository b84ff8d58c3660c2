"""One replica of the engine, from its first start to its end.

`Replica.run` is its whole life, read from top to bottom: start the engine, connect to it, bring it
up to date, serve until the session is lost; connect anew, or restart the engine; end.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.engine.channel.channel import Channel, connect_channel
from rollout.engine.channel.framing import Notifier
from rollout.engine.channel.handshake import CONNECT_S
from rollout.engine.channel.messages import (
    ChannelSettings,
    ClientExpectations,
    LoadWeights,
    ReceiveWeights,
)
from rollout.engine.core import EngineLoad
from rollout.engine.placement.placement import CoreSpec, Placement, ReplicaHandle
from rollout.engine.pool.generation import Generation, Loss, TokenCounts
from rollout.engine.routing import Router
from rollout.engine.weights import DiskWeights, DistributedWeights
from rollout.errors import ChannelError, EngineError
from rollout.limits import cleanup_scope
from rollout.observe.event_stream import EventStream
from rollout.observe.events import ReplicaChanged, ReplicaSampled
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rollout.engine.channel.messages import Operation
    from rollout.engine.routing import ReplicaState

logger = logging.getLogger("rollout.engine")

#: The longest pause before a replica is restarted, unless the first one is longer.
MAX_BACKOFF_S = 30.0
#: A replica that served this long was lost by something new: its next pause is the first again.
STABLE_S = 60.0
#: Between two attempts to connect anew.
RECONNECT_PAUSE_S = 0.2
#: To give back what a placement keeps for a replica.
RELEASE_S = 10.0


@attrs.frozen(eq=False)
class SentWeights:
    """Weights that replicas were told to load.

    Attributes:
        version: What the tokens sampled with them are stamped with.
        source: Where they find them.
        is_staged: Those are files of ours.
    """

    version: int
    source: DiskWeights | DistributedWeights
    is_staged: bool = False


@attrs.frozen(kw_only=True)
class ReplicaSettings:
    """How replicas are started and kept.

    Attributes:
        channel: How channels are run.
        expectations: Gives what the driver assumes about the model; awaited before each connect.
        watched: Channels whose silence the pool watches.
        connecting: How many handshakes run at once: those of thousands of replicas would all be
            late.
        start_timeout_s: From the start of the engine's process until it answers; also for an
            operation that it carries out.
        backoff_s: Pause before the first restart; doubled at each further loss or failed start.
        prepare: Brings a connected replica up to date; raises an `EngineError` where that cannot
            be, and the replica is restarted.
        on_change: Called when a replica comes to serve, is lost, fails to start or ends.
        on_load: Called with each load report of a replica that serves.
    """

    placement: Placement
    router: Router
    channel: ChannelSettings
    expectations: Callable[[], Awaitable[ClientExpectations]]
    watched: dict[Channel, None]
    connecting: anyio.CapacityLimiter
    start_timeout_s: float
    backoff_s: float
    prepare: Callable[[Replica, Channel], Awaitable[None]]
    on_change: Callable[[Replica], None]
    on_load: Callable[[Replica, EngineLoad], None]
    events: EventStream


class Replica:
    """One engine over all of its starts and sessions.

    Attributes:
        state: As in `ReplicaStatistics`, but "waiting".
        starts: How often it has come to serve.
        last_error: Why it does not serve; empty while it does, and before its first start.
        start_error: What its last start failed with.
        channel, routed: While it serves.
        waiting: Its session while it has started, and cannot have the current weights.
        requests: Those in flight there for which a caller waits.
        weights: What it was sent last since its engine started; None: what it started with.
        released: Memory that its engine has released, by tags.
        machines, is_here, machine: As in `ReplicaHandle`.
        tokens: What became of the tokens that arrived from it.
        is_drained: It gets nothing new, also after a restart.
        is_leaving: It is being removed.
        emptied: Notified when nothing is in flight there, and when it is lost.
        tried: Fires when its first start has succeeded or failed.
        gone: It has ended and is not restarted.
        prompt_tokens, cached_tokens: Of the requests that it has answered, and those of them that
            it had computed before.
    """

    def __init__(
        self, name: str, spec: CoreSpec, load_share: float, settings: ReplicaSettings
    ) -> None:
        self.name, self.spec, self.load_share = name, spec, load_share
        self.starts = 0
        self.last_error = ""
        self.start_error: EngineError | None = None
        self.channel: Channel | None = None
        self.waiting: Channel | None = None
        self.routed: ReplicaState | None = None
        self.requests: dict[Generation, None] = {}
        self.weights: SentWeights | None = None
        self.released: frozenset[str] = frozenset()
        self.machines, self.is_here, self.machine = 1, True, ""
        self.tokens = TokenCounts()
        self.prompt_tokens = self.cached_tokens = 0
        self.is_drained = self.is_leaving = False
        self.emptied = Notifier()
        self.tried = anyio.Event()
        self.gone = anyio.Event()
        self._settings = settings
        self._scope = anyio.CancelScope()
        self._loss: Loss | None = None
        self._commands = 0
        self._must_restart = False
        self._media_bytes = 0
        self._set_state("starting")

    # Its life.

    async def run(self) -> None:
        """Keep the engine serving until the replica is removed, or the pool closes.

        A start that fails is tried again, after pauses that grow.
        """
        first_s = pause_s = self._settings.backoff_s
        try:
            with self._scope:
                while True:
                    served_s = 0.0
                    try:
                        served_s = await self._run_engine()
                    except EngineError as error:
                        logger.error("%s did not start: %s", self.name, error)
                        self.start_error = error
                        self.note_error(str(error))
                        self.tried.set()
                        self._settings.on_change(self)
                    pause_s = first_s if served_s >= STABLE_S else pause_s
                    self._set_state("restarting")
                    await anyio.sleep(pause_s)
                    pause_s = min(2 * pause_s, max(MAX_BACKOFF_S, first_s))
        finally:
            try:
                with cleanup_scope(RELEASE_S):
                    await self._settings.placement.release(self.name)
            finally:
                self.last_error = ""
                self._set_state("removed" if self.is_leaving else "closed")
                self.tried.set()
                self.gone.set()
                self._settings.on_change(self)

    async def _run_engine(self) -> float:
        """Start the engine and serve by it, session after session, until it must be restarted.

        Returns for how long it served. An engine before it is gone: its context was left.
        """
        settings, served_s = self._settings, 0.0
        self.weights, self.released, self._must_restart = None, frozenset(), False
        placed = settings.placement.open_replica(self.name, self.spec, settings.start_timeout_s)
        try:
            async with placed as handle:
                self.machines, self.is_here = handle.machines, handle.is_here
                self.machine = handle.machine
                give_up_at: float | None = None  # it must connect at once the first time
                while not (self._must_restart or handle.died.is_set()):
                    try:
                        async with AsyncExitStack() as stack:
                            channel = await self._connect(handle, give_up_at, stack)
                            self._settle_loss(is_process_lost=False)
                            session_s = await self._serve(channel, handle)
                        served_s += session_s
                        if give_up_at is not None and session_s < RECONNECT_PAUSE_S:
                            raise ChannelError(f"{self.last_error}, after {session_s:.2f} s")
                        give_up_at = anyio.current_time() + settings.channel.reconnect_s
                    except ChannelError as error:
                        if give_up_at is None:
                            raise
                        if handle.died.is_set() or anyio.current_time() >= give_up_at:
                            logger.warning("%s: %s", self.name, error)
                            break
                        await anyio.sleep(RECONNECT_PAUSE_S)
        finally:
            self._settle_loss(is_process_lost=True)
        return served_s

    async def _connect(
        self, handle: ReplicaHandle, give_up_at: float | None, stack: AsyncExitStack
    ) -> Channel:
        """Begin a session with the engine, which `stack` ends."""
        settings, timeout_s = self._settings, CONNECT_S
        async with settings.connecting:
            if give_up_at is not None:
                timeout_s = max(give_up_at - anyio.current_time(), RECONNECT_PAUSE_S)
            connecting = connect_channel(
                self.name,
                handle.connect,
                handle.secret,
                settings=settings.channel,
                expectations=await settings.expectations(),
                timeout_s=timeout_s,
                watched=settings.watched,
            )
            return await stack.enter_async_context(connecting)

    async def _serve(self, channel: Channel, handle: ReplicaHandle) -> float:
        """Serve by one session until it is lost; returns for how long it served."""
        began: float | None = None
        async with open_task_group() as tasks:
            tasks.start_soon(self._lose_when_dead, channel, handle.died)
            try:
                with anyio.CancelScope() as preparing:
                    tasks.start_soon(_cancel_when_lost, channel, preparing)
                    await self._settings.prepare(self, channel)
                if not channel.lost.is_set():
                    self._begin_serving(channel)
                    began = anyio.current_time()
                    await channel.lost.wait()
            finally:
                channel.close()
                # Where it was being brought up to date, nobody knows what came of that.
                if channel.lost_cause != "connection" or began is None:
                    self._must_restart = True
        if began is None:
            raise ChannelError(channel.lost_reason)
        logger.warning("lost %s", channel.lost_reason)
        return anyio.current_time() - began

    async def _lose_when_dead(self, channel: Channel, died: anyio.Event) -> None:
        await died.wait()
        channel.lose("the engine died", "process")

    def _begin_serving(self, channel: Channel) -> None:
        """Let the router send requests to it, and close its books on the way to its loss."""
        self.channel = channel
        self.routed = self._settings.router.add(
            self.name,
            channel.info.max_requests,
            weight=self.load_share,
            weight_version=channel.info.weight_version,
        )
        if self.is_drained:
            self._settings.router.drain(self.name)
        # At once, so that no request is sent to a replica that is known to be lost.
        channel.on_lost = self._note_loss
        channel.on_load = self._report_load
        self.starts += 1
        self.last_error = ""
        self._set_state("serving", capacity=channel.info.most_at_once)
        self.tried.set()
        self._settings.on_change(self)

    def _note_loss(self) -> None:
        """The session is lost: called before any of its requests learns of it."""
        channel, self.channel, self.routed = self.channel, None, None
        assert channel is not None
        self._media_bytes += channel.media_bytes
        if self._commands:  # the engine may have done them, or half of one
            self._must_restart = True
        is_excused = channel.lost_cause in ("closed", "operation") or self._commands > 0
        self._loss = Loss(channel.lost_reason, is_excused)
        for request in self.requests:
            request.loss = self._loss
        self._settings.router.remove(self.name)
        self.note_error(channel.lost_reason)
        self._set_state("lost", channel.lost_reason)
        self._settings.on_change(self)

    def _settle_loss(self, *, is_process_lost: bool) -> None:
        if self._loss is not None:
            self._loss.settle(is_process_lost=is_process_lost)
            self._loss = None

    def _set_state(self, state: str, why: str = "", *, capacity: int = 0) -> None:
        self.state = state
        self.emptied.notify()
        events = self._settings.events
        if events.is_on:
            at = events.now()
            events.emit(
                ReplicaChanged(at=at, replica=self.name, state=state, why=why, capacity=capacity)
            )

    # What others ask of it.

    @property
    def is_serving(self) -> bool:
        """Whether the router may choose it: its session is not lost."""
        return self.channel is not None

    def restart(self, channel: Channel | None, why: str) -> None:
        """Have the engine restarted, unless the session `channel` is over already."""
        if channel is not None and channel.lost_cause is None:
            self._must_restart = True
            channel.close(why)

    def remove(self) -> None:
        """End it for good; its requests resume elsewhere."""
        self.is_leaving = True
        self._scope.cancel()

    def note_error(self, why: str) -> None:
        """Keep why it does not serve."""
        self.last_error = self.add_name(why)

    def add_name(self, why: str) -> str:
        """An error with the replica's name."""
        return why if why.startswith(self.name) else f"{self.name}: {why}"

    async def command(
        self, channel: Channel, operation: Operation, *, interrupts: bool = False
    ) -> str:
        """Have the engine do something within `start_timeout_s`; see `Channel.command`.

        An engine that takes longer, or whose session is lost meanwhile, is restarted: nobody knows
        what it has done.
        """
        limit_s = self._settings.start_timeout_s
        self._commands += 1
        try:
            with anyio.fail_after(limit_s):
                return await channel.command(operation, interrupts=interrupts)
        except TimeoutError:
            what = "no answer"
            if isinstance(operation, LoadWeights):
                what = f"the weights of version {operation.version} are not loaded"
            elif isinstance(operation, ReceiveWeights):
                what = "the weights that are broadcast are not received"
            why = f"{self.name}: {what} after engine.start_timeout_s = {limit_s:g} s"
            self.restart(channel, why)
            raise EngineError(why) from None
        finally:
            self._commands -= 1

    async def wait_empty(self) -> None:
        """Return when nothing is in flight there, or when it is lost."""
        routed = self.routed
        while routed is not None and self.in_flight and self.routed is routed:
            await self.emptied.wait()

    # What is known of it.

    @property
    def in_flight(self) -> int:
        """Requests sent and not known to be gone, aborted ones included."""
        return self.routed.in_flight if self.routed is not None else 0

    @property
    def media_bytes(self) -> int:
        """Bytes of images and videos that it was sent, over all of its sessions."""
        return self._media_bytes + (self.channel.media_bytes if self.channel else 0)

    def statistics(self) -> ReplicaStatistics:
        """A snapshot."""
        return ReplicaStatistics(
            name=self.name,
            state="waiting" if self.waiting is not None else self.state,
            in_flight=self.in_flight,
            zombies=self.channel.aborting if self.channel else 0,
            starts=self.starts,
            tokens=attrs.evolve(self.tokens),
            media_bytes=self.media_bytes,
            last_error=self.last_error,
        )

    def _report_load(self, load: EngineLoad) -> None:
        self._settings.router.report(self.name, load, now=anyio.current_time())
        self._settings.on_load(self, load)

    def sample(self, load: EngineLoad) -> ReplicaSampled:
        """What it does, by its engine's report and by what was sent there."""
        channel, routed = self.channel, self.routed
        return ReplicaSampled(
            at=self._settings.events.now(),
            replica=self.name,
            running=load.running,
            queued=load.queued,
            in_flight=self.in_flight,
            zombies=channel.aborting if channel else 0,
            capacity=channel.info.most_at_once if channel else 0,
            kv_used=load.kv_used,
            tokens_per_s=routed.tokens_per_s if routed else 0.0,
            generated_tokens=load.generated_tokens,
            preemptions=load.preemptions,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
        )


@attrs.frozen
class ReplicaStatistics:
    """One replica now.

    Attributes:
        state: "starting", "serving", "lost", "restarting" (it waits to be started again, or
            starts), "waiting" (it has started, and serves with the next weights), "removed" or
            "closed".
        in_flight: Requests sent and not known to be gone, zombies included.
        zombies: Cancelled requests whose end is not confirmed.
        starts: How often it has come to serve.
        tokens: What became of the tokens that arrived from it, over all of its starts.
        media_bytes: Of images and videos that it was sent, over all of its starts.
        last_error: Why it does not serve; empty while it does.
    """

    name: str
    state: str
    in_flight: int
    zombies: int
    starts: int
    tokens: TokenCounts = attrs.field(factory=TokenCounts)
    media_bytes: int = 0
    last_error: str = ""


class LoadWindow:
    """What engines reported while the window was open, over the time of a batch, and answered."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas
        self._values: dict[str, tuple[int, float, float]] = {}  # count, sum, largest
        self._before = self._count_prompt_tokens()

    def _count_prompt_tokens(self) -> dict[str, tuple[int, int]]:
        """Of each replica the tokens of prompts so far, and those computed before."""
        return {r.name: (r.prompt_tokens, r.cached_tokens) for r in self._replicas.values()}

    def take(self, sample: ReplicaSampled, waiting_requests: int) -> None:
        """Add a report, and how many requests wait in the queue meanwhile."""
        name = f"replica/{sample.replica}"
        values = {
            f"{name}/running": sample.running,
            f"{name}/kv_used": sample.kv_used,
            f"{name}/tokens_per_s": sample.tokens_per_s,
            "zombies": sample.zombies,
            "queue/engines": sample.queued,
            "queue/requests": waiting_requests,
        }
        if sample.capacity:
            values[f"{name}/utilisation"] = sample.running / sample.capacity
        for key, value in values.items():
            count, total, largest = self._values.get(key, (0, 0.0, 0.0))
            self._values[key] = (count + 1, total + value, max(largest, float(value)))

    @property
    def metrics(self) -> dict[str, float]:
        """Means and largest values over the reports; nothing of what none was about."""
        found: dict[str, float] = {}
        for name, (count, total, largest) in self._values.items():
            found[f"{name}/mean"], found[f"{name}/max"] = total / count, largest
        for name, (prompt, cached) in self._count_prompt_tokens().items():
            prompt_before, cached_before = self._before.get(name, (0, 0))
            if prompt > prompt_before:
                hits = (cached - cached_before) / (prompt - prompt_before)
                found[f"replica/{name}/prefix_hits"] = hits
        return found


def find_missing(replicas: Iterable[ReplicaStatistics]) -> tuple[str, ...]:
    """Names of those that do not serve and were not removed."""
    return tuple(r.name for r in replicas if r.state not in ("serving", "removed", "closed"))


def describe_errors(replicas: Iterable[Replica]) -> str:
    """Why each of them does not serve, without those that were removed."""
    staying = [replica for replica in replicas if not replica.is_leaving]
    errors = [each.last_error or f"{each.name}: {each.state}" for each in staying]
    return "; ".join(errors) or "all were removed"


async def _cancel_when_lost(channel: Channel, scope: anyio.CancelScope) -> None:
    await channel.lost.wait()
    scope.cancel()
