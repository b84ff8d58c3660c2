"""A call on an event loop, seen from a thread that waits for it."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import anyio

from rollout.bridge import wait_future
from rollout.errors import RolloutError
from rollout.scheduling.member_runs import CLOSED_MEANWHILE
from rollout.scopes import passing_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger("rollout")


class LoopCall:
    """One call on the runtime's loop, seen from the thread that waits for it.

    Attributes:
        future: What it returns or raises; a RolloutError where it was ended.
        is_accepted: The loop is going to perform it.
    """

    def __init__(self, function: Callable[[], Awaitable[Any]]) -> None:
        self._function = function
        self._scope: anyio.CancelScope | None = None
        self._is_abandoned = False
        self.is_accepted = False
        self.future: Future[Any] = Future()

    async def run(self) -> None:
        """Perform the call; its result or its error goes to the future.

        One that was cancelled before it begins is not performed: up to its first checkpoint it
        would have begun work that no cancellation ends.
        """
        try:
            if self._is_abandoned:
                return
            with anyio.CancelScope() as self._scope:
                try:
                    self.future.set_result(await self._function())
                except BaseException as error:
                    if passing_of(error) is not None:
                        raise
                    self.future.set_exception(error)
        finally:
            if not self.future.done():
                why = "the call was cancelled" if self._is_abandoned else CLOSED_MEANWHILE
                self.future.set_exception(RolloutError(why))

    def cancel(self) -> None:
        """End it, or have it not begin; on the runtime's loop."""
        self._is_abandoned = True
        if self._scope is not None:
            self._scope.cancel()
        elif not self.is_accepted:  # its caller was interrupted before it was handed over
            self.fail("the call was cancelled")

    def fail(self, why: str = "the runtime is closed") -> None:
        """No loop is going to perform it."""
        if not self.future.done():
            self.future.set_exception(RolloutError(why))

    async def settled(self) -> None:
        """Wait for its end on a loop of the caller's, whatever comes of it."""
        try:
            await wait_future(self.future)
        except Exception as error:
            logger.debug("a cancelled call ended with %r", error)
