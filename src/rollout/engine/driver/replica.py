"""The record of one engine over all of its starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.engine.channel.channel import Channel
from rollout.engine.driver.generation import TokenCounts
from rollout.engine.driver.recovery import Attempt
from rollout.engine.placement.placement import CoreSpec, ReplicaHandle
from rollout.engine.routing import ReplicaState
from rollout.engine.weight_staging import unstage
from rollout.engine.weights import DiskWeights, DistributedWeights
from rollout.observe.event_stream import EventStream
from rollout.observe.events import ReplicaChanged, ReplicaSampled
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.engine.core import EngineLoad


class Weights:
    """Weights that replicas were told to load.

    Attributes:
        version: What the tokens sampled with them are stamped with.
        source: Where they find them.
        is_staged: Those are files of ours.
    """

    def __init__(
        self, version: int, source: DiskWeights | DistributedWeights, *, is_staged: bool = False
    ) -> None:
        self.version = version
        self.source = source
        self.is_staged = is_staged

    def can_reach(self, *, is_here: bool) -> bool:
        """Whether a replica that has just started, here or elsewhere, can still get them."""
        if isinstance(self.source, DistributedWeights):
            return False
        return is_here or not self.is_staged

    async def discard(self) -> None:
        """They are not needed any more; shielded, and harmless when called again."""
        if not self.is_staged or not isinstance(self.source, DiskWeights):
            return
        with anyio.CancelScope(shield=True):  # gigabytes take a second, and no more
            await run_in_thread(unstage, self.source.path)


@attrs.define(eq=False)
class Replica:
    """One engine over all of its starts; what becomes of it changes by its own methods only.

    Attributes:
        state: "starting", "serving", "lost", "restarting", "removed" or "closed".
        starts: How often it has come to serve.
        last_error: Why it does not serve; empty while it does, and before its first start.
        channel, routed: While it serves.
        weights: What it was given last since it started; None: what it starts with.
        machines, is_here, machine: Of where it lives; see `ReplicaHandle`.
        lost: Those that were when it was lost last, and how many requests were in flight in all.
        loss_classified: Fires when it is known whether that was a death.
        media_bytes: Of images and videos that it was sent over channels that are lost.
        is_drained: It is to get nothing new, whatever becomes of it meanwhile.
        is_leaving: It is being removed.
        is_closed_by_driver: Nothing that it has in flight is to blame for its end.
        scope: Ends it; None before it is kept.
        gone: It has ended and is not restarted.
        prompt_tokens, cached_tokens: Of the requests that it has answered, and those of them that
            it had computed before.
        events: Takes what becomes of it.
    """

    name: str
    spec: CoreSpec
    load_share: float = 1.0
    state: str = "starting"
    starts: int = 0
    last_error: str = ""
    channel: Channel | None = None
    routed: ReplicaState | None = None
    weights: Weights | None = None
    machines: int = 1
    is_here: bool = True
    machine: str = ""
    tokens: TokenCounts = attrs.field(factory=TokenCounts)
    lost: tuple[tuple[Attempt, ...], int] = ((), 0)
    loss_classified: anyio.Event = attrs.field(factory=anyio.Event)
    media_bytes: int = 0
    is_drained: bool = False
    is_leaving: bool = False
    is_closed_by_driver: bool = False
    scope: anyio.CancelScope | None = None
    gone: anyio.Event = attrs.field(factory=anyio.Event)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    events: EventStream = attrs.field(factory=EventStream)

    @property
    def is_serving(self) -> bool:
        """Whether it is routed to: its channel is not lost."""
        return self.channel is not None and not self.channel.lost.is_set()

    # From its start to its end.

    def begin(self, scope: anyio.CancelScope) -> None:
        """It is kept from now on, until `scope` is cancelled: at once if it was removed before."""
        self.scope = scope
        self._tell("starting")
        if self.is_leaving:
            scope.cancel()

    def live_in(self, handle: ReplicaHandle) -> None:
        """It has been started there."""
        self.machines, self.is_here, self.machine = handle.machines, handle.is_here, handle.machine
        self.weights = None

    def take_weights(self, weights: Weights) -> None:
        """It has these weights."""
        self.weights = weights

    def serve(self, channel: Channel, routed: ReplicaState) -> None:
        """It gets requests from now on."""
        self.state, self.is_closed_by_driver, self.last_error = "serving", False, ""
        self.channel, self.routed = channel, routed
        self.starts += 1
        self._tell("serving", capacity=channel.info.most_at_once)

    def lose(self, running: tuple[Attempt, ...]) -> None:
        """Its channel is lost: it gets nothing more, and whether it died is not known yet.

        Args:
            running: Generations whose request is in flight there.
        """
        assert self.routed is not None
        self.lost, self.loss_classified = (running, self.routed.in_flight), anyio.Event()
        self.routed = None
        why = "" if self.channel is None else self.channel.lost_reason
        self.state = "lost"
        self.note_error(why)
        self._tell(self.state, why)

    def classify_loss(self) -> tuple[tuple[Attempt, ...], int]:
        """Whether it died is known; the requests that were in flight there, and their number."""
        lost, self.lost = self.lost, ((), 0)
        self.loss_classified.set()
        self.media_bytes += self.channel.media_bytes if self.channel else 0
        self.channel = self.routed = None
        return lost

    def restart(self, channel: Channel, why: str) -> None:
        """Have it restarted by the end of its channel; nothing in flight there is to blame."""
        self.is_closed_by_driver = True
        channel.close(why)

    def note_error(self, why: str) -> None:
        """Keep why it does not serve."""
        self.last_error = self.name_in(why)

    def name_in(self, why: str) -> str:
        """What went wrong, with its name."""
        return why if why.startswith(self.name) else f"{self.name}: {why}"

    def begin_restart(self) -> None:
        """It waits to be started again."""
        self.state = "restarting"
        self._tell(self.state)

    def drain(self) -> None:
        """It is to get nothing new."""
        self.is_drained = True

    def resume(self) -> None:
        """End `drain`."""
        self.is_drained = False

    def remove(self) -> None:
        """End it for good; nothing that it has in flight is to blame."""
        self.is_leaving = self.is_closed_by_driver = True
        if self.scope is not None:
            self.scope.cancel()

    def end(self) -> None:
        """Nothing of it is left."""
        self.state, self.last_error = "removed" if self.is_leaving else "closed", ""
        self._tell(self.state)
        self.gone.set()

    def count_prompt(self, tokens: int, cached: int) -> None:
        """It has answered a request of so many tokens, of which it had computed some before."""
        self.prompt_tokens += tokens
        self.cached_tokens += cached

    def sample(self, load: EngineLoad) -> ReplicaSampled:
        """What it does, by what its engine said and by what was sent there."""
        channel, routed = self.channel, self.routed
        return ReplicaSampled(
            at=self.events.now(),
            replica=self.name,
            running=load.running,
            queued=load.queued,
            in_flight=routed.in_flight if routed else 0,
            zombies=channel.aborting if channel else 0,
            capacity=channel.info.most_at_once if channel else 0,
            kv_used=load.kv_used,
            tokens_per_s=routed.speed.tokens_per_s if routed else 0.0,
            generated_tokens=load.generated_tokens,
            preemptions=load.preemptions,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
        )

    def _tell(self, state: str, why: str = "", capacity: int = 0) -> None:
        if self.events.is_on:
            self.events.emit(
                ReplicaChanged(
                    at=self.events.now(),
                    replica=self.name,
                    state=state,
                    why=why,
                    capacity=capacity,
                )
            )


def last_errors(replicas: Iterable[Replica]) -> str:
    """Why each of them does not serve, without those that were removed."""
    staying = [replica for replica in replicas if not replica.is_leaving]
    errors = [each.last_error or f"{each.name}: {each.state}" for each in staying]
    return "; ".join(errors) or "all were removed"
