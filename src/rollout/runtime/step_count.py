"""Which step a call of a runtime is."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollout.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator


class StepCount:
    """Numbers the calls that name no step."""

    def __init__(self) -> None:
        self._next = 0

    @contextmanager
    def counted(self, step: int | None) -> Iterator[int]:
        """The step of a call: its number, where it has none; one that is refused does not count."""
        if step is not None:
            yield step
            return
        number = self._next
        self._next += 1
        try:
            yield number
        except PromptError:
            if self._next == number + 1:
                self._next = number
            raise
