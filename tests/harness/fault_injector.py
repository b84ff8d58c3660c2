"""Errors on demand."""

from __future__ import annotations


class InjectedError(Exception):
    """What the race harness lets a tool, a simulated user or a starting engine raise."""


class FaultInjector:
    """Lets the next answer of a tool or of a simulated user be an error, once it is armed."""

    def __init__(self) -> None:
        self.is_armed = False

    def check(self) -> None:
        """Raise where it is armed, and disarm it."""
        if self.is_armed:
            self.is_armed = False
            raise InjectedError("injected by the harness")
