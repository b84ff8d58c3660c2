"""How a batch is getting on: one line, live on a terminal and now and then elsewhere."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import anyio
import attrs

from rollout.plurals import count

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rich.console import Console, RenderableType

#: Tokens per second are of the last so many seconds.
WINDOW_S = 10.0
#: From one look at the counts to the next, and from one printed line to the next.
LOOK_S = 0.2
PLAIN_S = 5.0
#: Width of the bar in characters.
BAR_WIDTH = 24


class Counts(Protocol):
    """What progress is made of; `rollout.runtime.RuntimeStatistics` has it."""

    @property
    def admitted(self) -> int:
        """Trajectories accepted."""

    @property
    def running(self) -> int:
        """Those of them that are under way."""

    @property
    def finished(self) -> int:
        """Those of them that have an outcome."""

    @property
    def generated_tokens(self) -> int:
        """Sampled tokens."""

    @property
    def tool_calls(self) -> int:
        """Calls answered."""


@attrs.frozen
class Reading:
    """The counts at one time, with the recent speed.

    Attributes:
        tokens_per_s: Over the last `WINDOW_S` seconds, or what there is of them.
    """

    done: int = 0
    total: int = 0
    running: int = 0
    tool_calls: int = 0
    tokens_per_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.done}/{self.total} done · {self.running} running · "
            f"{self.tokens_per_s:,.0f} tok/s · {count(self.tool_calls, 'tool call')}"
        )


class ProgressMeter:
    """Turns counts, looked at from time to time, into readings. Owns no clock and no task."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[float, int]] = deque()

    def read(self, now: float, counts: Counts) -> Reading:
        """The reading at `now`, in seconds of any clock that never goes back."""
        self._tokens.append((now, counts.generated_tokens))
        # The last entry before the window stays: the window begins somewhere after it.
        while len(self._tokens) > 2 and self._tokens[1][0] <= now - WINDOW_S:
            self._tokens.popleft()
        since, tokens = self._tokens[0]
        seconds = now - since
        return Reading(
            done=counts.finished,
            total=counts.admitted,
            running=counts.running,
            tool_calls=counts.tool_calls,
            tokens_per_s=(counts.generated_tokens - tokens) / seconds if seconds > 0 else 0.0,
        )


class ProgressDisplay:
    """Shows one changing line on `console`; a context manager that leaves the screen tidy.

    On a terminal the line and a bar stay in place; elsewhere each look prints a line.
    """

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._bar: tuple[int, int] | None = None
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def is_plain(self) -> bool:
        """Whether lines stay where they are printed."""
        return self._live is None

    @property
    def interval_s(self) -> float:
        """From one line to the next."""
        return PLAIN_S if self._live is None else LOOK_S

    def show(self, line: str, bar: tuple[int, int] | None = None) -> None:
        """Put `line` in place of the last one; `bar` is how much is done, of how much."""
        if self._live is None:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            self._live.update(_with_bar(line, bar), refresh=True)


def _with_bar(line: str, bar: tuple[int, int] | None) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if bar is None:
        return Text(line)
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(total=bar[1], completed=bar[0], width=BAR_WIDTH), Text(line))
    return grid


async def show_progress(
    display: ProgressDisplay, starting: str, counts: Callable[[], Counts | None]
) -> None:
    """Show how a batch is getting on until cancelled, and where it got to then.

    Args:
        display: Where.
        starting: What is said while `counts` gives None.
        counts: The counts now.
    """
    meter = ProgressMeter()
    began = anyio.current_time()
    due, shown = began, ""
    if display.is_plain:
        display.show(starting)
    try:
        while True:
            now, reading = anyio.current_time(), _reading(meter, counts)
            if reading is not None and now >= due:
                due = now + display.interval_s
                shown = _show(display, reading, shown)
            elif reading is None and not display.is_plain:
                display.show(f"{starting} … {now - began:.0f} s")
            await anyio.sleep(LOOK_S)
    finally:
        reading = _reading(meter, counts)
        if reading is not None:
            _show(display, reading, shown)


def _reading(meter: ProgressMeter, counts: Callable[[], Counts | None]) -> Reading | None:
    now = counts()
    return None if now is None else meter.read(anyio.current_time(), now)


def _show(display: ProgressDisplay, reading: Reading, shown: str) -> str:
    """Show the reading unless it is what is `shown`; what is shown now."""
    if str(reading) != shown:
        display.show(str(reading), (reading.done, reading.total))
    return str(reading)
