"""Answers of calls, for clients that ask again since they did not get them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs

from rollout.gateway.calls import Completion
from rollout.gateway.turn_index import Turn

#: A connection can turn out to be broken after its last byte was written, and a proxy can lose
#: what it has read: so many answers of a trajectory are stored for that.
STORED = 64


@attrs.define(eq=False, kw_only=True)
class Reply:
    """The answer of a call.

    Attributes:
        digest: Of the call's body; equal bodies ask for the same.
        id: The completion's.
        build: Makes the completion; the tokens that the model read are not copied for it.
        turns: What it consists of.
        is_lost: Whether its client left before it had all of it.
        replays: How often it was sent to clients that retry.
    """

    digest: bytes
    id: str
    build: Callable[[], Completion]
    turns: Sequence[Turn]
    is_lost: bool = False
    replays: int = 0


class Replies:
    """Those of one trajectory that clients may ask for again, the last ones."""

    def __init__(self) -> None:
        self._replies: deque[Reply] = deque(maxlen=STORED)

    def add(self, reply: Reply) -> None:
        """Store a new one."""
        self._replies.append(reply)

    def mark_lost(self, completion_id: str) -> None:
        """The client left before it had all of an answer."""
        for reply in self._replies:
            if reply.id == completion_id:
                reply.is_lost = True

    def find(self, digest: bytes, *, is_retry: bool) -> Reply | None:
        """The answer of an equal call whose client has not got it.

        A client that says that it retries has no answer, whatever became of the bytes: where none
        is lost, it gets the last answer that nobody has continued, before those that were sent to
        other retries.
        """
        equal = [each for each in self._replies if digest and each.digest == digest]
        lost = next((each for each in equal if each.is_lost), None)
        if lost is not None:
            lost.is_lost = False
        if lost is not None or not is_retry:
            return lost
        open_ends = [
            each for each in reversed(equal) if not any(turn.is_extended for turn in each.turns)
        ]
        found = min(open_ends, key=lambda each: each.replays, default=None)
        if found is not None:
            found.replays += 1
        return found
