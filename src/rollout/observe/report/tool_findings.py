"""What stands out in a run's tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.observe.report.finding import (
    NOTABLE,
    SEVERE,
    Finding,
    Run,
    listed,
    percent,
    quoted,
)
from rollout.plurals import count
from rollout.types import NOT_PARSED, UNKNOWN_TOOL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.observe.report.series import ToolFigures

#: A tool is slow that takes so much of the trajectories' time, or of that of the slowest ones, and
#: a call of which takes at least so long.
SLOW_SHARE, SLOW_TAIL_SHARE, SLOW_S, TAIL = 0.3, 0.5, 0.1, 0.05
#: A tool hangs of which a call has been under way for so many seconds, and for so many times what
#: 19 in 20 of its other calls took at most.
HANGING_S, HANGING_TIMES = 5.0, 4
#: Errors among the answers of a tool, of at least so many.
ERRING_SHARE, ERRING_CALLS = 0.3, 5


def slow_tools(run: Run) -> Iterable[Finding]:
    """Tools that trajectories wait for, and those that have not answered."""
    trajectories = list(run.times.trajectories.values())
    spent = sum(sum(each.spent(run.times.end).values()) for each in trajectories)
    slowest = run.slowest(TAIL)
    late = sum(sum(each.spent(run.times.end).values()) for each in slowest)
    for tool in run.tools:
        own, own_late = (run.tool_seconds(tool.name, some) for some in (trajectories, slowest))
        is_slow = tool.mean >= SLOW_S and spent and own / spent >= SLOW_SHARE
        is_slow_late = tool.longest >= SLOW_S and late and own_late / late >= SLOW_TAIL_SHARE
        share = f"{percent(own, spent)} of the trajectories' time"
        if _hangs(tool):
            yield _hanging_tool(tool, share, run)
        elif is_slow:
            yield _slow_tool(tool, share, run)
        elif is_slow_late and len(slowest) < len(trajectories):
            what = f"{percent(own_late, late)} of the time of the slowest trajectories"
            yield _slow_tool(tool, what, run)
    if not run.times.is_known:
        yield from _slow_tools_of_rows(run)


def _hangs(tool: ToolFigures) -> bool:
    return tool.waiting >= max(HANGING_S, HANGING_TIMES * (tool.usual or 0.0))


def _hanging_tool(tool: ToolFigures, share: str, run: Run) -> Finding:
    others = (
        "No call of it has ended."
        if tool.usual is None
        else f"Of those that have ended, 19 in 20 took {tool.usual:.2f} s or less."
    )
    return Finding(
        kind="slow_tool",
        severity=SEVERE,
        title=(
            f"{count(tool.under_way, 'call')} of {tool.name!r} "
            f"{'has' if tool.under_way == 1 else 'have'} not ended, the longest for "
            f"{tool.waiting:.0f} s"
        ),
        text=(
            f"{others} Calls of it take {share} so far; engines have nothing to do for a "
            f"trajectory that waits for it. limits.tool_s bounds a call."
        ),
        filter=_filter(tool, run),
    )


def _filter(tool: ToolFigures, run: Run) -> str:
    """Only trajectories that have ended are in the table."""
    is_shown = any(tool.name in row.tools for row in run.rows)
    return f"tool:{quoted(tool.name)}" if is_shown else ""


def _slow_tool(tool: ToolFigures, what: str, run: Run) -> Finding:
    waits = (
        f" {tool.under_way:,} of them {'has' if tool.under_way == 1 else 'have'} not ended."
        if tool.under_way
        else ""
    )
    return Finding(
        kind="slow_tool",
        severity=SEVERE,
        title=f"The tool {tool.name!r} is slow: it takes {what}",
        text=(
            f"{count(tool.calls, 'call')} took {tool.mean:.2f} s on average, {tool.p95:.2f} s for "
            f"one in twenty, {tool.longest:.2f} s at the longest, {tool.total:.1f} s altogether in "
            f"a run of {run.times.duration:.1f} s.{waits} Engines have nothing to do for a "
            f"trajectory that waits for it."
        ),
        filter=_filter(tool, run),
    )


def _slow_tools_of_rows(run: Run) -> Iterable[Finding]:
    """As far as trajectories say it themselves."""
    timed = [row for row in run.rows if row.seconds and row.calls]
    spent = sum(row.seconds or 0.0 for row in timed)
    own, calls = sum(row.tool_s or 0.0 for row in timed), sum(row.calls for row in timed)
    if not spent or own / spent < SLOW_SHARE or own / calls < SLOW_S:
        return
    names = ", ".join(repr(name) for name in dict.fromkeys(n for row in timed for n in row.tools))
    yield Finding(
        kind="slow_tool",
        severity=SEVERE,
        title=f"Tools are slow: they take {percent(own, spent)} of the trajectories' time",
        text=f"{count(calls, 'call')} of {names} took {own / calls:.2f} s on average.",
        filter="tools>0.1",
    )


def erring_tools(run: Run) -> Iterable[Finding]:
    for tool in run.tools:
        # What is in no format is no tool's, and an error in any case: it is a part of all calls.
        is_tool = tool.name not in (NOT_PARSED, UNKNOWN_TOOL)
        some = [tool] if is_tool else run.tools
        calls = sum(each.calls - each.under_way for each in some)
        if calls >= ERRING_CALLS and tool.errors / calls >= ERRING_SHARE:
            share = percent(tool.errors, calls)
            title = f"The tool {tool.name!r} answers {share} of its calls with an error"
            if not is_tool:
                is_parsed = tool.name == UNKNOWN_TOOL
                title = f"{share} of calls " + (
                    "named tools that there are not" if is_parsed else "could not be parsed"
                )
            yield Finding(
                kind="calls_not_parsed" if tool.name == NOT_PARSED else "erring_tool",
                severity=NOTABLE,
                title=title,
                text=(
                    f"{tool.errors:,} of {count(calls, 'call')}; the answers say:"
                    f"{listed(run.tool_errors(tool.name))}"
                ),
                filter="errors>0"
                if tool.name == UNKNOWN_TOOL
                else f"tool:{quoted(tool.name)} errors>0",
            )
