"""Requests that wait for a place on a replica, served in their order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable


class _Turn:
    __slots__ = ("came", "scope")

    def __init__(self) -> None:
        self.came = anyio.Event()
        self.scope: anyio.CancelScope | None = None


class WaitQueue:
    """A first-in, first-out queue of tasks; freed room wakes the first one.

    Args:
        has_room: Whether it is worth looking.

    Attributes:
        deadline: When they are sent away.
    """

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._turns: dict[_Turn, None] = {}
        self.deadline = math.inf

    def __len__(self) -> int:
        return len(self._turns)

    async def wait(self) -> bool:
        """Return when it is the caller's turn; False once the line's deadline has passed.

        A caller that does not use the turn calls `wake_next`; cancellation passes it on.
        """
        turn = _Turn()
        self._turns[turn] = None
        try:
            with anyio.CancelScope(deadline=self.deadline) as turn.scope:
                await turn.came.wait()
        except BaseException:
            if self._turns.pop(turn, self) is self:
                self.wake_next()  # the turn was given to us
            raise
        if turn.came.is_set():
            return True
        del self._turns[turn]
        return False

    def wake_next(self) -> None:
        """Give the first in line its turn, if there is room."""
        if self._turns and self._has_room():
            turn = next(iter(self._turns))
            del self._turns[turn]
            turn.came.set()

    def wake_all(self) -> None:
        """Let all of them look, because nothing is as it was."""
        for turn in self._turns:
            turn.came.set()
        self._turns.clear()

    def close_at(self, deadline: float) -> None:
        """Send them away then, those that come later too; infinity takes it back."""
        self.deadline = deadline
        for turn in self._turns:
            if turn.scope is not None:
                turn.scope.deadline = deadline


class Notifier:
    """Wakes all tasks that wait for a change; costs nothing where none does."""

    def __init__(self) -> None:
        self._changed: anyio.Event | None = None

    async def wait(self) -> None:
        """Return at the next `notify`."""
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def notify(self) -> None:
        """Wake all waiting tasks."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None
