"""The command line: ``rollout run``, ``demo``, ``report``, ``timeline``, ``check``,
``check-template``, ``serve-gateway`` and ``replay``.

Commands are imported when they run, so that ``rollout --help`` answers at once.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from rollout.cli.command_arguments import make_parser

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, see ``rollout --help``.

    It owns SIGINT and SIGTERM meanwhile, so it must be called on the main thread.

    Args:
        argv: Arguments without the program's name; None takes those of the process, which is about
            to end then: a signal that comes later ends it at once.

    Raises:
        SystemExit: ``--help``, ``--version``, or bad usage (code 2).
    """
    arguments = make_parser().parse_args(argv)
    from rollout.cli.explain_signal import explaining_at_signal

    try:
        try:
            with _terminable(), explaining_at_signal(lambda: None):
                from rollout.cli.commands import run_command

                code = run_command(arguments)
        finally:
            if argv is None:
                _leave_at_signals()
    except KeyboardInterrupt:
        code = _interrupted(signal.SIGINT)
    except _Terminated:
        code = _interrupted(signal.SIGTERM)
    # At the end of the process, collecting what torch has made takes a second, and is no use.
    atexit.register(gc.freeze)
    return code


def _interrupted(signum: int) -> int:
    with suppress(OSError):
        print("interrupted", file=sys.stderr)
    return 128 + signum


def _leave_at_signals() -> None:
    """From now on a signal ends the process at once: all that it still does is to end.

    Python would show a traceback of whatever it tears down just then, and exit with any code.
    """

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        with suppress(Exception):  # what is being written, or is not read
            _interrupted(signum)
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, leave)


class _Terminated(BaseException):
    """SIGTERM came while no event loop was there to take it."""


@contextmanager
def _terminable() -> Iterator[None]:
    def terminate(signum: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
