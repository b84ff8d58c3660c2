"""What the engines said that they were doing, over the time of a batch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollout.engine.pool.replica import Replica
    from rollout.observe.events import ReplicaSampled


@attrs.define
class _Sum:
    count: int = 0
    total: float = 0.0
    longest: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.longest = max(self.longest, value)


class LoadWindow:
    """The reports of the engines while the window was open, and what they answered.

    Args:
        replicas: As of `LoadWindows`.
    """

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas
        self._sums: dict[str, _Sum] = {}
        self._before = self._prompt_counts()

    def _prompt_counts(self) -> dict[str, tuple[int, int]]:
        """Of each replica the tokens of prompts so far, and those computed before."""
        return {
            each.name: (each.prompt_tokens, each.cached_tokens) for each in self._replicas.values()
        }

    def take(self, sample: ReplicaSampled, waiting_requests: int) -> None:
        """A report, and how many requests wait for a place meanwhile."""
        name = f"replica/{sample.replica}"
        if sample.capacity:
            self._add(f"{name}/utilisation", sample.running / sample.capacity)
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
        for name, (prompt, cached) in self._prompt_counts().items():
            prompt_before, cached_before = self._before.get(name, (0, 0))
            if prompt > prompt_before:
                hits = (cached - cached_before) / (prompt - prompt_before)
                found[f"replica/{name}/prefix_hits"] = hits
        return found


class LoadWindows:
    """Those that are open.

    Args:
        replicas: By name, as they come and go.
    """

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas
        self._open: dict[LoadWindow, None] = {}

    @contextmanager
    def window(self) -> Iterator[LoadWindow]:
        """The engines' reports of one batch."""
        window = LoadWindow(self._replicas)
        self._open[window] = None
        try:
            yield window
        finally:
            del self._open[window]

    @property
    def are_open(self) -> bool:
        """Whether any is."""
        return bool(self._open)

    def take(self, sample: ReplicaSampled, waiting_requests: int) -> None:
        """An engine has reported."""
        for window in self._open:
            window.take(sample, waiting_requests)
