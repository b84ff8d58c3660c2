"""What a pool says of one replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from rollout.engine.driver.generation import TokenCounts

if TYPE_CHECKING:
    from rollout.engine.driver.replica import Replica


@attrs.frozen
class ReplicaStatistics:
    """One replica now.

    Attributes:
        state: "starting", "serving", "lost", "restarting" (it waits to be started again, or
            starts), "removed" or "closed".
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


def statistics_of(replica: Replica) -> ReplicaStatistics:
    """A snapshot."""
    return ReplicaStatistics(
        name=replica.name,
        state=replica.state,
        in_flight=replica.routed.in_flight if replica.routed else 0,
        zombies=replica.channel.aborting if replica.channel else 0,
        starts=replica.starts,
        tokens=attrs.evolve(replica.tokens),
        media_bytes=replica.media_bytes + (replica.channel.media_bytes if replica.channel else 0),
        last_error=replica.last_error,
    )
