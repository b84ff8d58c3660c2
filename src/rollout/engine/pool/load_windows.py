"""What the engines reported over the time of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.engine.pool.replica import Replica
    from rollout.observe.events import ReplicaSampled


class LoadWindow:
    """The reports of the engines while the window was open, and what they answered."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas
        self._values: dict[str, tuple[int, float, float]] = {}  # count, sum, largest
        self._before = self._count_prompt_tokens()

    def _count_prompt_tokens(self) -> dict[str, tuple[int, int]]:
        """Of each replica the tokens of prompts so far, and those computed before."""
        return {r.name: (r.prompt_tokens, r.cached_tokens) for r in self._replicas.values()}

    def take(self, sample: ReplicaSampled, waiting_requests: int) -> None:
        """Add a report, and how many requests wait in the queue meanwhile."""
        name = f"replica/{sample.replica}"
        values = {
            f"{name}/running": sample.running,
            f"{name}/kv_used": sample.kv_used,
            f"{name}/tokens_per_s": sample.tokens_per_s,
            "zombies": sample.zombies,
            "queue/engines": sample.queued,
            "queue/requests": waiting_requests,
        }
        if sample.capacity:
            values[f"{name}/utilisation"] = sample.running / sample.capacity
        for key, value in values.items():
            count, total, largest = self._values.get(key, (0, 0.0, 0.0))
            self._values[key] = (count + 1, total + value, max(largest, float(value)))

    @property
    def metrics(self) -> dict[str, float]:
        """Means and largest values over the reports; nothing of what none was about."""
        found: dict[str, float] = {}
        for name, (count, total, largest) in self._values.items():
            found[f"{name}/mean"], found[f"{name}/max"] = total / count, largest
        for name, (prompt, cached) in self._count_prompt_tokens().items():
            prompt_before, cached_before = self._before.get(name, (0, 0))
            if prompt > prompt_before:
                hits = (cached - cached_before) / (prompt - prompt_before)
                found[f"replica/{name}/prefix_hits"] = hits
        return found
