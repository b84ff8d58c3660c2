"""Those who wait for a place on a replica, served in their order."""

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


class WaitingLine:
    """A line of tasks; whoever makes room lets the first one look.

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

        Who does not use the turn calls `call_next`; cancellation passes it on.
        """
        turn = _Turn()
        self._turns[turn] = None
        try:
            with anyio.CancelScope(deadline=self.deadline) as turn.scope:
                await turn.came.wait()
        except BaseException:
            if self._turns.pop(turn, self) is self:
                self.call_next()  # the turn was given to us
            raise
        if turn.came.is_set():
            return True
        del self._turns[turn]
        return False

    def call_next(self) -> None:
        """Give the first in line its turn, if there is room."""
        if self._turns and self._has_room():
            turn = next(iter(self._turns))
            del self._turns[turn]
            turn.came.set()

    def call_all(self) -> None:
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


class Bell:
    """Wakes whoever waits for something to change; costs nothing where nobody does."""

    def __init__(self) -> None:
        self._rung: anyio.Event | None = None

    async def wait(self) -> None:
        """Return at the next `ring`."""
        if self._rung is None:
            self._rung = anyio.Event()
        await self._rung.wait()

    def ring(self) -> None:
        """Wake all who wait."""
        if self._rung is not None:
            self._rung.set()
            self._rung = None
