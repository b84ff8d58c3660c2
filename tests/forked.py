"""Programs that run in forks of the process of tests, which has imported all that they need.

A new interpreter imports torch, tensordict and transformers for six seconds of CPU before a driver
can begin. A fork has them. It differs from a process of its own in this: nothing of the shutdown of
an interpreter happens in it, and agents, tools and modules of earlier tests are known to it.
"""

from __future__ import annotations

import logging
import os
import runpy
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_DESCRIPTORS = "/proc/self/fd"
#: What Python itself does not show.
_SILENT = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def rollout_command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """``rollout …`` in a fork; options are those of `start_fork`."""

    def main() -> object:
        from rollout.cli import main

        return main([*arguments])

    return start_fork(main, **options)


def python_program(text: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """``python -c text …`` in a fork; options are those of `start_fork`."""

    def main() -> None:
        sys.argv = ["-c", *arguments]
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})

    return start_fork(main, **options)


def python_script(path: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """``python path …`` in a fork; options are those of `start_fork`."""

    def main() -> None:
        sys.argv = [str(path), *arguments]
        sys.path[0] = str(path.parent)
        runpy.run_path(str(path), run_name="__main__")

    return start_fork(main, **options)


def start_fork(
    main: Callable[[], object], *, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """A fork that exits with what `main` returns or raises, as the process of a program.

    Args:
        env: Of the fork, if not this process's.
        options: Of `subprocess.Popen`.
    """
    before = {*os.listdir(_DESCRIPTORS)}

    def run() -> None:
        # Popen calls this before it replaces the program, and waits until the pipe closes that
        # would tell it of a failure: what it has opened for that and for the streams is closed.
        for each in {*os.listdir(_DESCRIPTORS)} - before - {"0", "1", "2"}:
            try:
                os.close(int(each))
            except OSError:  # what the listing itself needed
                continue
        _forget_pytest()
        if "torch" in sys.modules:  # no other thread of it is in the fork
            sys.modules["torch"].set_num_threads(1)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        sys.path.insert(0, "")
        os._exit(_exit_code(main))

    command = [sys.executable]  # which it never becomes
    options = {"text": True, "restore_signals": False, **options}
    return subprocess.Popen(command, preexec_fn=run, **options)  # noqa: PLW1509  (no thread of ours)


def _forget_pytest() -> None:
    """Streams, logging, warnings and hooks are a new process's."""
    streams = [open(number, mode, closefd=False) for number, mode in enumerate("rww")]  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    for category in _SILENT:
        warnings.simplefilter("ignore", category)


def _exit_code(main: Callable[[], object]) -> int:
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120  # as Python's own
    return int(code or 0)
