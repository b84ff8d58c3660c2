"""A side of a comparison in a process of its own, which does one thing for each line it is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Where the modules of both sides are found.
HERE = Path(__file__).parents[1]
#: Processes that start again and again find compiled modules.
UNCOMPILED = "PYTHONDONTWRITEBYTECODE"
#: Closing what a hundred thousand agents have left takes its time.
CLOSE_S = 60.0


class SideFailed(Exception):
    """A side ended before its time; it has said why on stderr."""


class SideProcess:
    """`python -m MODULE OPTIONS`, which answers a line of JSON to each line; blocks.

    Attributes:
        first: What it said by itself, when it was ready.
    """

    def __init__(self, module: str, options: dict[str, Any], python: str = sys.executable) -> None:
        self._name = module
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(options)],
            cwd=HERE,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self._answer()

    def ask(self, **arguments: Any) -> dict[str, Any]:
        """What it says to one more line, which has these."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(f"{self._name} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it; one that is in the middle of a round, because another side failed, by force."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def _environment() -> dict[str, str]:
    """One compute thread, as `make` has it too; modules that are compiled once."""
    given = {name: value for name, value in os.environ.items() if name != UNCOMPILED}
    return {"OMP_NUM_THREADS": "1", **given}


@contextmanager
def answers_on_stdout() -> Iterator[Callable[[dict[str, Any]], None]]:
    """In a side's process: what it answers with; whatever else is printed goes to stderr."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(descriptor, "w") as stream:

        def answer(figures: dict[str, Any]) -> None:
            stream.write(json.dumps(figures) + "\n")
            stream.flush()

        yield answer
