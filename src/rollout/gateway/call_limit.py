"""How many calls of one trajectory generate: refused ones are none of them."""

from __future__ import annotations

import anyio


class CallLimit:
    """Counts calls when they begin to generate; never more than `most`.

    A call reserves a place before it is known whether it can be served. One that finds all places
    taken, some of them by calls that may yet be refused, waits until that is known.

    Args:
        most: None allows any number.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._made = self._reserved = 0
        self._changed: anyio.Event | None = None  # None while nobody waits

    async def reserve(self) -> bool:
        """Take a place, to be used or given back; False where there is none."""
        while self._most is not None and self._made + self._reserved >= self._most:
            if self._made >= self._most:
                return False
            self._changed = self._changed or anyio.Event()
            await self._changed.wait()
        self._reserved += 1
        return True

    def use(self) -> None:
        """A call that has a place generates."""
        self._made += 1
        self.give_back()

    def give_back(self) -> None:
        """A call that has a place does not generate."""
        self._reserved -= 1
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()
