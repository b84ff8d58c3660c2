"""Where commands write for people; what cannot be written there ends no work."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rollout.cli.wrapping import PLAIN_WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterator


class _LastingStream:
    """A stream whose writes may fail: its reader has left, or the disk is full.

    The work and its exit code stay what they are.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def give_up(self) -> None:
        """Leave nothing in it that Python would fail to write when it ends."""
        try:
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def lasting_consoles() -> Iterator[tuple[Console, Console]]:
    """The consoles of standard output and standard error."""
    streams: list[Any] = [_LastingStream(sys.stdout), _LastingStream(sys.stderr)]
    output = Console(file=streams[0])
    if not output.is_terminal:
        output = Console(file=streams[0], width=PLAIN_WIDTH)
    try:
        yield output, Console(file=streams[1])
    finally:
        for stream in streams:
            stream.give_up()
