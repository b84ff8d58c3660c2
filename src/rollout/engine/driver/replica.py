"""The record of one engine over all of its starts."""

from __future__ import annotations

import anyio
import attrs

from rollout.engine.driver.channel import Channel
from rollout.engine.driver.generation import TokenCounts
from rollout.engine.driver.recovery import Attempt
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.routing import ReplicaState
from rollout.engine.weights import DiskWeights, DistributedWeights
from rollout.engine.wire.staging import unstage


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

    def discard(self) -> None:
        """They are not needed any more; harmless when called again."""
        if self.is_staged and isinstance(self.source, DiskWeights):
            unstage(self.source.path)


@attrs.define(eq=False)
class Replica:
    """One engine over all of its starts.

    Attributes:
        state: "starting", "serving", "restarting", "given up", "removed" or "closed".
        starts: How often it has come to serve.
        channel, routed: While it serves.
        weights: What it was given last since it started; None: what it starts with.
        machines, is_here, machine: Of where it lives; see `ReplicaHandle`.
        running: Generations whose request is in flight there.
        lost: Those that were when it was lost last, and how many requests were in flight in all.
        loss_classified: Fires when it is known whether that was a death.
        is_drained: It is to get nothing new, whatever becomes of it meanwhile.
        is_leaving: It is being removed.
        is_closed_by_driver: Nothing that it has in flight is to blame for its end.
        scope: Ends it; None before it is kept.
        gone: It has ended and is not restarted.
    """

    name: str
    spec: CoreSpec
    load_share: float = 1.0
    state: str = "starting"
    starts: int = 0
    channel: Channel | None = None
    routed: ReplicaState | None = None
    weights: Weights | None = None
    machines: int = 1
    is_here: bool = True
    machine: str = ""
    tokens: TokenCounts = attrs.field(factory=TokenCounts)
    running: dict[Attempt, None] = attrs.field(factory=dict)
    lost: tuple[tuple[Attempt, ...], int] = ((), 0)
    loss_classified: anyio.Event = attrs.field(factory=anyio.Event)
    is_drained: bool = False
    is_leaving: bool = False
    is_closed_by_driver: bool = False
    scope: anyio.CancelScope | None = None
    gone: anyio.Event = attrs.field(factory=anyio.Event)

    @property
    def is_serving(self) -> bool:
        """Whether it is routed to: its channel is not lost."""
        return self.channel is not None and not self.channel.lost.is_set()
