"""Where a child process is while it imports a user's modules, for the error of one that is slow."""

from __future__ import annotations

import faulthandler
import importlib
import linecache
import re
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.function_refs import FunctionRef

#: Notes taken before the limit, and the shortest pause between two, in seconds.
_NOTES, _SHORTEST_S = 20, 0.02
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


class ImportWatch:
    """What a process notes of its imports; see `opened_watch`.

    Attributes:
        file: Where it does; empty where nothing limits the imports.
        every_s: How often.
    """

    def __init__(self, file: str, limit_s: float | None) -> None:
        self.file = file
        self.every_s = max((limit_s or 0.0) / _NOTES, _SHORTEST_S)

    def describe_slow(self, functions: Sequence[FunctionRef], limit: str) -> str:
        """What took too long, where it was, and what to do about it.

        Args:
            functions: What was to be imported.
            limit: Which limit is over, with its value.
        """
        names = ", ".join(f"{each.qualname} of {each.home}" for each in functions)
        return (
            f"{names} was not imported within {limit}, by a new process of {sys.executable}, which "
            f"{self._last_place()}; raise the limit, import what is slow within the function, and "
            'put what a script starts under `if __name__ == "__main__":`'
        )

    def _last_place(self) -> str:
        """What the process did when it last noted that."""
        *_, note = Path(self.file).read_text(errors="replace").split("Timeout (")
        for thread in note.split("\n\n"):
            frames = [match for line in thread.splitlines() if (match := _FRAME.fullmatch(line))]
            ours = [at for at, frame in enumerate(frames) if frame["name"] == "_import_home"]
            if not ours:
                continue
            skipped = ("<frozen", importlib.__file__, str(Path(__file__).parent / "user_files.py"))
            inner = [frame for frame in frames[: ours[0]] if not frame["file"].startswith(skipped)]
            if inner:
                place = f"was at {_place(inner[-1])}"
                return place if len(inner) == 1 else f"{place}, in {_place(inner[0])}"
        return "was still starting"


def _place(frame: re.Match[str]) -> str:
    text = linecache.getline(frame["file"], int(frame["line"])).strip()
    return f"{frame['file']}, line {frame['line']}" + (f" (`{text}`)" if text else "")


@contextmanager
def opened_watch(limit_s: float | None) -> Iterator[ImportWatch]:
    """A watch for imports that may take so long."""
    if limit_s is None:
        yield ImportWatch("", None)
        return
    with tempfile.NamedTemporaryFile(prefix="rollout-import-") as file:
        yield ImportWatch(file.name, limit_s)


@contextmanager
def noting_imports(file: str, every_s: float) -> Iterator[None]:
    """In the child: note in the file where the block is, also where it never lets a thread run."""
    if not file:
        yield
        return
    with open(file, "a") as notes:
        faulthandler.dump_traceback_later(every_s, repeat=True, file=notes)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
