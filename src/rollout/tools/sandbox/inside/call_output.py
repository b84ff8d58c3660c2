"""What a call in a sandbox prints, up to a bound."""

from __future__ import annotations

import os
import select

_PIECE = 65536
#: Bytes that a pipe may hold, at most (/proc/sys/fs/pipe-max-size).
_PIPE = 1 << 20


class CallOutput:
    """What a call prints, up to a bound."""

    def __init__(self, descriptor: int, bound: int) -> None:
        self.descriptor = descriptor
        self._bound = bound
        self._data = bytearray()
        os.set_blocking(descriptor, False)

    @property
    def is_full(self) -> bool:
        """Whether more was printed than may be."""
        return len(self._data) > self._bound

    def read(self) -> bool:
        """Take what is there, at most a piece; False at the end."""
        try:
            piece = os.read(self.descriptor, _PIECE)
        except BlockingIOError:
            return True
        self._data += piece
        return bool(piece)

    def drain(self) -> None:
        """Take what was printed before the call's end was known."""
        while not self.is_full and select.select([self.descriptor], [], [], 0)[0] and self.read():
            pass

    def text(self) -> str:
        """What was printed, as far as it is kept."""
        return self._data[: self._bound].decode(errors="replace")


class OutputTail(CallOutput):
    """The end of what a program prints; a lot of it stops nothing."""

    @property
    def is_full(self) -> bool:
        return False

    def read(self) -> bool:
        is_open = super().read()
        del self._data[: -self._bound]
        return is_open

    def drain(self) -> None:
        """Take what was printed before the end; a process that was left writes no end to it."""
        for _ in range(_PIPE // _PIECE + 1):
            if not (select.select([self.descriptor], [], [], 0)[0] and self.read()):
                return

    def text(self) -> str:
        return self._data.decode(errors="replace")
