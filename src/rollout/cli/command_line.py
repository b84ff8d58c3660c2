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

    code, came = 0, list[int]()
    try:
        try:
            with _interruptible(came), explaining_at_signal(lambda: None):
                from rollout.cli.commands import run_command

                code = run_command(arguments)
        finally:
            if argv is None:
                _leave_at_signals()
    except* KeyboardInterrupt:
        code = _interrupted(signal.SIGTERM if came else signal.SIGINT)
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


@contextmanager
def _interruptible(came: list[int]) -> Iterator[None]:
    """Within the block SIGTERM does as Ctrl-C, and is put into `came`.

    Ctrl-C ends event loops from wherever they are. An exception of ours would not: trio takes one
    that a signal raises within its own tasks for a fault of trio.
    """

    def terminate(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        signal.raise_signal(signal.SIGINT)

    # Shells have SIGINT ignored by what they start with `&`.
    handlers = {signal.SIGTERM: terminate, signal.SIGINT: signal.default_int_handler}
    before = {signum: signal.signal(signum, each) for signum, each in handlers.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
