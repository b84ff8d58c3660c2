"""The one task in which an async source is asked for all of its prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from rollout.containment import Contained

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollout.containment import Containment

    Job = Callable[[], Awaitable[object]]


class SourceTask(Contained[None]):
    """Asks a source whenever that is wanted, and closes it, all in one task.

    What an async generator has open where it yields, such as a task group that prefetches, belongs
    to the task that asked it: asked or closed in another one, it would leave that out of turn.
    """

    def __init__(self, containment: Containment, what: str) -> None:
        super().__init__(containment, what)
        self._asked = anyio.Event()
        self._is_ending = False

    def ask(self) -> None:
        """Have it asked once more."""
        self._asked.set()

    def cancel(self) -> None:
        """Ask it no more, and close it."""
        self._is_ending = True
        self._asked.set()
        super().cancel()

    async def ask_until_cancelled(self, pull: Job, close: Job) -> None:
        """Ask it, and again when that is wanted; until `cancel`."""
        # Entered before any scope of the source's, which may be open wherever we are below.
        with anyio.CancelScope() as whole:
            try:
                while not self._is_ending:
                    await pull()
                    await self._until_asked()
            finally:
                whole.shield = True
                await close()

    async def _until_asked(self) -> None:
        # A scope that the source has open may be cancelled meanwhile, as by a task of its own that
        # failed: it meets that when it is asked.
        with anyio.CancelScope(shield=True):
            await self._asked.wait()
        self._asked = anyio.Event()
