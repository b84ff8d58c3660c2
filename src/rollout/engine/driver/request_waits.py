"""What the generations of a pool wait for."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rollout.observe.explanation import Wait
from rollout.seeds import split_session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.engine.driver.recovery import Attempt


#: The engine does not say which of the two it is.
NO_TOKEN = "no token so far: in its queue, or being prefilled"


def waits_of(attempts: Iterable[Attempt], now: float) -> dict[str, list[Wait]]:
    """By trajectory, as its main conversation's session is called."""
    waits: dict[str, list[Wait]] = defaultdict(list)
    for attempt in attempts:
        trajectory, path = split_session(attempt.session_id)
        waits[trajectory].append(_wait_of(attempt, path, now))
    return waits


def _wait_of(attempt: Attempt, path: str, now: float) -> Wait:
    if attempt.is_running:
        tokens = attempt.generation.count
        note = f"{tokens:,} tokens so far" if attempt.has_answer else NO_TOKEN
        since = now - attempt.asked_at
        return Wait("generation", since, attempt.generation.replica, note=note, path=path)
    carried_since = attempt.clock.carried_since
    if carried_since is not None:
        return Wait("held", now - carried_since, path=path)
    return Wait("queue", now - attempt.waits_since, path=path)
