"""One request between the question where it goes and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from rollout.engine.routing.replica_state import ReplicaState


class Dispatch:
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
        fresh_tokens: Tokens of the prompt that this replica has to compute.
        is_counted: Whether it is in flight.
    """

    __slots__ = (
        "avoid",
        "fresh_tokens",
        "holders",
        "is_counted",
        "new_tokens",
        "pinned",
        "prompt_tokens",
        "replica",
        "session_id",
        "shared_tokens",
        "warm_tokens",
    )
    replica: ReplicaState

    def __init__(self, session_id: str, prompt_tokens: int, new_tokens: int) -> None:
        self.session_id = session_id
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.pinned: ReplicaState | None = None
        self.warm_tokens = 0
        self.holders: Collection[ReplicaState] = ()
        self.shared_tokens = 0
        self.avoid: ReplicaState | None = None
        self.fresh_tokens = prompt_tokens
        self.is_counted = False

    def __repr__(self) -> str:
        replica = getattr(self, "replica", None)
        return f"<Dispatch {self.session_id} to {replica.name if replica else 'nobody yet'}>"
