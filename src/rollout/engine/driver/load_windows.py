"""What the engines said that they were doing, over the time of a batch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from rollout.observe.events import ReplicaSampled

if TYPE_CHECKING:
    from collections.abc import Iterator


@attrs.define
class _Sum:
    count: int = 0
    total: float = 0.0
    longest: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.longest = max(self.longest, value)


@attrs.define(eq=False)
class LoadWindow:
    """The reports of the engines while the window was open."""

    _sums: dict[str, _Sum] = attrs.field(factory=dict)
    _first: dict[str, ReplicaSampled] = attrs.field(factory=dict)
    _last: dict[str, ReplicaSampled] = attrs.field(factory=dict)

    def take(self, sample: ReplicaSampled, waiting_requests: int) -> None:
        """A report, and how many requests wait for a place meanwhile."""
        name = f"replica/{sample.replica}"
        self._first.setdefault(sample.replica, sample)
        self._last[sample.replica] = sample
        if sample.capacity:
            self._add(f"{name}/utilisation", sample.in_flight / sample.capacity)
        self._add(f"{name}/running", float(sample.running))
        self._add(f"{name}/kv_used", sample.kv_used)
        self._add(f"{name}/tokens_per_s", sample.tokens_per_s)
        self._add("zombies", float(sample.zombies))
        self._add("queue/engines", float(sample.queued))
        self._add("queue/requests", float(waiting_requests))

    def _add(self, name: str, value: float) -> None:
        self._sums.setdefault(name, _Sum()).add(value)

    @property
    def metrics(self) -> dict[str, float]:
        """Means and largest values over the reports; nothing of what none was about."""
        found: dict[str, float] = {}
        for name, each in self._sums.items():
            found[f"{name}/mean"] = each.total / each.count
            found[f"{name}/max"] = each.longest
        for replica, last in self._last.items():
            first = self._first[replica]
            prompt = last.prompt_tokens - first.prompt_tokens
            if prompt > 0:
                hits = (last.cached_tokens - first.cached_tokens) / prompt
                found[f"replica/{replica}/prefix_hits"] = hits
        return found


class LoadWindows:
    """Those that are open."""

    def __init__(self) -> None:
        self._open: dict[LoadWindow, None] = {}

    @contextmanager
    def window(self) -> Iterator[LoadWindow]:
        """The engines' reports of one batch."""
        window = LoadWindow()
        self._open[window] = None
        try:
            yield window
        finally:
            del self._open[window]

    def take(self, sample: ReplicaSampled, waiting_requests: int) -> None:
        """An engine has reported."""
        for window in self._open:
            window.take(sample, waiting_requests)
