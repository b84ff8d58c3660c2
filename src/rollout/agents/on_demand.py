"""What is made when somebody first asks for it."""

from __future__ import annotations

from typing import Any

#: What stands for something that nobody has asked for.
NOT_MADE: Any = object()


class ListOnDemand:
    """A list that is made when somebody first asks for it: most trajectories never need it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_{name}"

    def __get__(self, state: Any, owner: type) -> list[Any]:
        values: list[Any] = getattr(state, self._slot)
        if values is NOT_MADE:
            values = []
            setattr(state, self._slot, values)
        return values

    def __set__(self, state: Any, values: list[Any]) -> None:
        setattr(state, self._slot, values)
