"""What an engine's process wrote last, for the error that says why it did not start."""

from __future__ import annotations

import re
from collections import deque

#: How long what was written before an answer is waited for.
READ_S = 1.0
#: Lines that are kept; of these as many are shown of a process that said nothing else.
_KEPT, _SHOWN = 200, 20
#: Exceptions that are shown beside an engine's own error, and characters of each.
_CAUSES, _WIDTH = 3, 300
#: The last line of a traceback, perhaps after the time of a log: a type, and mostly a message.
_EXCEPTION = re.compile(
    r"(?:\[[^\]]*\] *)?((?:\w+\.)*(\w*(?:Error|Exception|Exit|Expired|Interrupt)(?:: .*)?))"
)

#: What the engine's side imports whatever its core is.
_LACKING = re.compile(r"No module named '(rollout|anyio|msgspec)'")


class LastOutput:
    """The last lines of standard error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self.add = self._lines.append

    def describe_exit(self, code: int) -> str:
        """Why a process ended that was to start an engine."""
        shown = [*self._lines][-_SHOWN:]
        said = f"; it said last:{_list_lines(shown)}" if shown else ""
        lacking = _LACKING.search("\n".join(shown))
        if lacking is not None:
            said += (
                f"\n  placement.python needs the package {lacking[1]} in its environment: "
                "`pip install anyio msgspec`, and this library by `pip install --no-deps`"
            )
        return f"the engine's process ended with exit code {code} while starting{said}"

    def describe_error(self, error: str) -> str:
        """An engine's own error, and exceptions before it: a process of the engine's may know more.

        Args:
            error: What the engine said.
        """
        found: dict[str, None] = {}
        known = error.split("\n")[0]
        for line in [*self._lines]:  # another thread may add more meanwhile
            match = _EXCEPTION.fullmatch(line)
            if match is not None and match[2] not in error and not match[1].endswith(known):
                found[match[1][:_WIDTH]] = None
        causes = [*found][-_CAUSES:]
        return f"{error}; before that was said:{_list_lines(causes)}" if causes else error


def _list_lines(lines: list[str]) -> str:
    return "".join(f"\n    {line}" for line in lines)
