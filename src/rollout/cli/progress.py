"""How a batch is getting on: one line, live on a terminal and now and then elsewhere."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import anyio
import attrs

from rollout.cli.live_details import live_details
from rollout.cli.time_left import TimeLeft, time_left_words
from rollout.clocks import monotonic
from rollout.plurals import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from rich.console import Console, RenderableType

    from rollout.cli.live_details import Detail
    from rollout.runtime.runtime import RolloutRuntime

#: Tokens per second are of the last so many seconds.
WINDOW_S = 10.0
#: From one look at the counts to the next, and from one printed line to the next.
LOOK_S = 0.2
PLAIN_S = 5.0
#: Width of the bar, and of the labels below it, in characters.
BAR_WIDTH, LEAST_BAR_WIDTH, LABEL_WIDTH = 24, 6, 9
#: From one look at what all trajectories wait for to the next, and how many times the time that a
#: look takes: of thousands it takes milliseconds of the event loop.
DETAILS_S, DETAILS_TIMES = 1.0, 200


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
        left_s: Until all have ended; None where there is no ground for an estimate.
    """

    done: int = 0
    total: int = 0
    running: int = 0
    tool_calls: int = 0
    tokens_per_s: float = 0.0
    left_s: float | None = None

    def __str__(self) -> str:
        left = "" if self.left_s is None else f" · {time_left_words(self.left_s)}"
        return (
            f"{self.done}/{self.total} done · {self.running} running · "
            f"{self.tokens_per_s:,.0f} tok/s · {count(self.tool_calls, 'tool call')}{left}"
        )


class ProgressMeter:
    """Turns counts, looked at from time to time, into readings. Owns no clock and no task."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[float, int]] = deque()
        self._time_left = TimeLeft()

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
            left_s=self._time_left.read(now, counts.finished, counts.admitted),
        )


class ProgressDisplay:
    """Shows one changing line on `console`; a context manager that leaves the screen tidy.

    On a terminal the line and a bar stay in place, and what is below them; elsewhere each look
    prints a line.
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

    def show(
        self, line: str, bar: tuple[int, int] | None = None, details: Sequence[Detail] = ()
    ) -> None:
        """Put `line` in place of the last one.

        Args:
            bar: How much is done, of how much.
            details: Lines below it, on a terminal.
        """
        if self._live is None:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            room = max(LEAST_BAR_WIDTH, min(BAR_WIDTH, self._console.width - len(line) - 1))
            self._live.update(_with_bar(line, bar, room, details), refresh=True)


def _with_bar(
    line: str, bar: tuple[int, int] | None, room: int, details: Sequence[Detail]
) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if bar is None:
        return Text(line)
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(total=bar[1], completed=bar[0], width=room), Text(line))
    below = (
        Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), text, no_wrap=True, overflow="ellipsis")
        for label, text in details
    )
    return Group(grid, *below)


async def show_progress(
    display: ProgressDisplay,
    starting: str,
    counts: Callable[[], Counts | None],
    details: Callable[[], Sequence[Detail]] = tuple,
) -> None:
    """Show how a batch is getting on until cancelled, and where it got to then.

    Args:
        display: Where.
        starting: What is said while `counts` gives None.
        counts: The counts now.
        details: Lines for below them, on a terminal.
    """
    meter, below = ProgressMeter(), _Details(display, details)
    began = anyio.current_time()
    due, shown = began, ""
    if display.is_plain:
        display.show(starting)
    try:
        while True:
            now, reading = anyio.current_time(), _reading(meter, counts)
            if reading is not None and now >= due:
                due = now + display.interval_s
                shown = _show(display, reading, shown, below.read(now))
            elif reading is None and not display.is_plain:
                display.show(f"{starting} … {now - began:.0f} s")
            await anyio.sleep(LOOK_S)
    finally:
        reading = _reading(meter, counts)
        if reading is not None:
            _show(display, reading, shown)


class _Details:
    """Looks at them now and then: the more it costs, the less often."""

    def __init__(self, display: ProgressDisplay, look: Callable[[], Sequence[Detail]]) -> None:
        self._look, self._is_wanted = look, not display.is_plain
        self._due = 0.0
        self._known: Sequence[Detail] = ()

    def read(self, now: float) -> Sequence[Detail]:
        """Those that are known at `now`."""
        if self._is_wanted and now >= self._due:
            began = monotonic()
            self._known = self._look()
            self._due = now + max(DETAILS_S, DETAILS_TIMES * (monotonic() - began))
        return self._known


def details_of(runtime: RolloutRuntime) -> Sequence[Detail]:
    """Those of a runtime."""
    return live_details(runtime.explain(), runtime.statistics().replicas)


def _reading(meter: ProgressMeter, counts: Callable[[], Counts | None]) -> Reading | None:
    now = counts()
    return None if now is None else meter.read(anyio.current_time(), now)


def _show(
    display: ProgressDisplay, reading: Reading, shown: str, details: Sequence[Detail] = ()
) -> str:
    """Show the reading unless it is what is `shown`; what is shown now."""
    said = "\n".join((str(reading), *(f"{label} {text}" for label, text in details)))
    if said != shown:
        display.show(str(reading), (reading.done, reading.total), details)
    return said
