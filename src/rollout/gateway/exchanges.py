"""Calls until their answers are delivered: a client that left before may ask again."""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING

import anyio

from rollout.gateway.answers import minted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.gateway.calls import Completion
    from rollout.gateway.samples import Sample
    from rollout.gateway.tree import Turn

#: How long a call waits to learn whether the client of an equal one got its answer, which is on
#: its way to it at that moment.
FATE_S = 1.0
#: A connection can turn out to be broken after its last byte was written, and a proxy can lose what
#: it has read: so many answers are kept for that.
KEPT = 64


class State(enum.Enum):
    """Where the answer of a call is."""

    RUNNING = "running"
    RETURNED = "returned"
    LEFT = "left"
    DELIVERED = "delivered"


class Exchange:
    """A call, what was sampled for it, and whether its client has it.

    Attributes:
        digest: Of its body; equal bodies ask for the same.
        owner: Stands for the call that it is answered for; it refers to nothing, so that both end
            with their last use.
        working: Held by the call that has it generated: one that was cut may still be ending.
        completion: Makes its answer, once it is whole; the conversation is not kept for that.
        completion_id: Names it then.
        changed: Set when its state changes; None while nobody waits for that.
        is_counted: Whether it is one of the trajectory's calls: something of it was generated.
        replays: How often its answer was given again after it had been delivered.
    """

    def __init__(self, digest: bytes, samples: list[Sample]) -> None:
        self.samples = samples
        self.digest = digest
        self.owner: object = None
        self.completion: Callable[[], Completion] | None = None
        self.completion_id = ""
        self.state = State.RUNNING
        self.working = anyio.Lock(fast_acquire=True)
        self.changed: anyio.Event | None = None
        self.is_counted = False
        self.replays = 0
        self._turns: Sequence[Turn] = ()

    def finish(
        self, completion_id: str, completion: Callable[[], Completion], turns: Sequence[Turn]
    ) -> None:
        """Its answer, of these turns, is whole: what it was sampled for is not needed any more."""
        self.completion_id, self.completion, self._turns = completion_id, completion, turns
        self.samples = []

    @property
    def is_continued(self) -> bool:
        """Whether somebody goes on from its answer, and so has it."""
        return any(turn.is_extended for turn in self._turns)

    def become(self, state: State) -> None:
        """Who waits for a change learns of it."""
        self.state = state
        changed, self.changed = self.changed, None
        if changed is not None:
            changed.set()


def completion_id_of(answer_id: str) -> str:
    """Names the completion whose first answer this is."""
    return minted("completion", answer_id)


class Exchanges:
    """Those of one trajectory that a client may ask for again."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, list[Exchange]] = {}
        self._by_id: dict[str, Exchange] = {}
        self._delivered: deque[Exchange] = deque()

    def add(self, exchange: Exchange) -> None:
        """A new one, which is running."""
        if exchange.digest:
            self._by_digest.setdefault(exchange.digest, []).append(exchange)

    def returned(self, exchange: Exchange) -> None:
        """Its answer is on its way."""
        exchange.become(State.RETURNED)
        self._by_id[exchange.completion_id] = exchange

    def failed(self, exchange: Exchange) -> None:
        """It has no answer, and was told so."""
        self._drop(exchange)
        exchange.become(State.DELIVERED)

    def left(self, exchange: Exchange) -> None:
        """Its client left, wherever it was."""
        if exchange.state is State.DELIVERED and exchange not in self._delivered:
            return
        if exchange in self._delivered:
            self._delivered.remove(exchange)
        exchange.become(State.LEFT)

    def of(self, completion_id: str) -> Exchange | None:
        """That of an answer, while it is known."""
        return self._by_id.get(completion_id)

    def delivered(self, exchange: Exchange) -> None:
        """Its client has the last byte; as far as can be known."""
        if exchange.state is not State.RETURNED:
            return
        exchange.become(State.DELIVERED)
        self._delivered.append(exchange)
        while len(self._delivered) > KEPT:
            self._drop(self._delivered.popleft())

    async def claim(self, digest: bytes, *, is_retry: bool = False) -> Exchange | None:
        """One with the same body whose client left: running again, and the caller's from now on.

        A client that says that it retries has no answer, whatever became of the bytes: where none
        has left, it gets the last answer that nobody has continued, before those that were given
        to other retries.
        """
        deadline = anyio.current_time() + FATE_S
        while True:
            equal = self._by_digest.get(digest, [])
            found = next((each for each in equal if each.state is State.LEFT), None)
            on_its_way = next((each for each in equal if each.state is State.RETURNED), None)
            is_known = on_its_way is None or anyio.current_time() >= deadline
            if found is None and is_retry and is_known:
                found = _lost(equal)
            if found is not None:
                return self._taken(found)
            if on_its_way is None or is_known:
                return None
            changed = on_its_way.changed = on_its_way.changed or anyio.Event()
            with anyio.move_on_at(deadline):
                await changed.wait()

    def _taken(self, exchange: Exchange) -> Exchange:
        if exchange.state is not State.LEFT:
            exchange.replays += 1
        if exchange in self._delivered:
            self._delivered.remove(exchange)
        exchange.become(State.RUNNING)
        return exchange

    def abandoned(self) -> list[Exchange]:
        """Those whose clients left and never asked again."""
        exchanges = [each for equal in self._by_digest.values() for each in equal]
        return [each for each in exchanges if each.state is State.LEFT]

    def _drop(self, exchange: Exchange) -> None:
        equal = self._by_digest.get(exchange.digest, [])
        if exchange in equal:
            equal.remove(exchange)
            if not equal:
                del self._by_digest[exchange.digest]
        self._by_id.pop(exchange.completion_id, None)


def _lost(exchanges: Sequence[Exchange]) -> Exchange | None:
    """Whose answer a client that retries has probably not got."""
    told = (State.RETURNED, State.DELIVERED)
    found = [each for each in reversed(exchanges) if each.state in told and not each.is_continued]
    return min(found, key=lambda each: each.replays, default=None)
