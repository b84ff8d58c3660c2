"""SIGUSR1: says on standard error what everything waits for."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What is said before there is anything to explain.
STARTING = "nothing runs so far"


@contextmanager
def explaining_at_signal(explain: Callable[[], object | None]) -> Iterator[None]:
    """Within the block SIGUSR1 prints what `explain` gives; None says that nothing runs so far.

    A plain handler, which Python calls between two steps of its own even where some code blocks the
    event loop. It writes past whatever is being written to the terminal just then.
    """
    if not hasattr(signal, "SIGUSR1"):
        yield
        return

    def tell(*_: object) -> None:
        try:
            text = str(explain() or STARTING)
        except Exception as error:  # something was half changed just then: it can be asked again
            text = f"cannot be told now ({type(error).__name__}: {error}); ask again"
        with suppress(OSError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())

    before = signal.signal(signal.SIGUSR1, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
