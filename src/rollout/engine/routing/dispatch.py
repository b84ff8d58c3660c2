"""One request between the question where it goes and its end."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import msgspec

from rollout.engine.routing.replica_state import ReplicaState


class Dispatch(msgspec.Struct, eq=False, gc=False):
    """A request: what a strategy may know of it, and then where it went.

    Attributes:
        session_id: The trajectory.
        prompt_tokens: Length of its prompt, whatever of it is cached.
        new_tokens: How many tokens it is expected to generate.
        pinned: Where the trajectory's last request went; None for a new one, and where that
            replica is no longer offered. It may be full, draining or stale.
        warm_tokens: Tokens of the prompt that `pinned` has in its cache.
        holders: Replicas that have the prompt of the trajectory's group in their cache.
        shared_tokens: Length of that prompt.
        avoid: A replica that must not get it, because it has just refused it.
        replica: Where it went; set when that is decided.
        fresh_tokens: Tokens of the prompt that this replica has to compute; all, until it is known.
        is_counted: Whether it is in flight.
    """

    session_id: str
    prompt_tokens: int
    new_tokens: int
    fresh_tokens: int
    pinned: ReplicaState | None = None
    warm_tokens: int = 0
    holders: Collection[ReplicaState] = ()
    shared_tokens: int = 0
    avoid: ReplicaState | None = None
    replica: ReplicaState = cast("ReplicaState", None)
    is_counted: bool = False

    def __repr__(self) -> str:
        place = self.replica.name if self.replica else "nobody yet"
        return f"<Dispatch {self.session_id} to {place}>"
