"""Connections that have proved nothing yet: few at a time, and not for long.

Loaded in engine processes: imports anyio only.
"""

from __future__ import annotations

import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Iterator

#: From the acceptance of a connection to its proof.
AUTHENTICATION_S = 5.0
#: Where there is no room, one that is older than this makes room for the next; a client of ours
#: needs a few milliseconds.
YOUNG_S = 0.05
#: At once, and of the descriptors that the process may have open.
MAX_UNAUTHENTICATED, SHARE_OF_DESCRIPTORS = 64, 8
MIN_UNAUTHENTICATED = 4


def max_unauthenticated() -> int:
    """As many as leave the process enough descriptors for its own work."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_UNAUTHENTICATED
    return max(MIN_UNAUTHENTICATED, min(MAX_UNAUTHENTICATED, soft // SHARE_OF_DESCRIPTORS))


class UnauthenticatedConnections:
    """Connections that have proved nothing yet, in the order of arrival.

    Args:
        most: At once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._present: dict[anyio.CancelScope, float] = {}
        self._changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._present)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Around all that is done with a connection; leaves it when its time is over."""
        now = anyio.current_time()
        with anyio.CancelScope(deadline=now + AUTHENTICATION_S) as scope:
            self._present[scope] = now
            try:
                yield
            finally:
                self._forget(scope)

    async def make_room(self) -> None:
        """Return when one more may come: one has left, or the oldest one had time enough."""
        while len(self._present) >= self._most:
            came_at = next(iter(self._present.values()))
            with anyio.CancelScope(deadline=came_at + YOUNG_S) as patience:
                await self._changed.wait()
            if patience.cancelled_caught:
                self.close_oldest()

    def close_oldest(self) -> None:
        """End the one that has been here for longest, if there is one."""
        scope = next(iter(self._present), None)
        if scope is not None:
            scope.cancel()
            self._forget(scope)

    def _forget(self, scope: anyio.CancelScope) -> None:
        if self._present.pop(scope, None) is not None:
            self._changed.set()
            self._changed = anyio.Event()
