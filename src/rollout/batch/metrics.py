"""Figures about a batch. What is unknown is absent: no -1, no NaN."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from rollout.types import DRIFT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.chat.trajectory import Trajectory

#: Metrics of trajectories that are summed up, with their names in a batch.
_SUMS = {
    "resumes": "recovery/resumes",
    "restarts": "recovery/restarts",
    "discarded_tokens": "tokens/discarded",
    "cut_prompt_tokens": "tokens/cut_prompt",
    "cached_tokens": "tokens/cached",
    "sampled_placeholders": "media/sampled_placeholders",
    "pinned_calls": "gateway/pinned_calls",
    "tool_calls": "tool_calls",
    "tool_errors": "tool_errors",
}


def batch_metrics(
    trajectories: Sequence[Trajectory], extra: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of a batch by name, as the table in ``docs/observe.md`` explains them.

    Durations are in seconds, tokens are summed over trajectories, spreads are over trajectories.

    Args:
        extra: What was measured while the call ran: ``batch_s``, ``weights/version`` (of the
            engines now), ``loop_lag_s/max``, ``loop_starved_s/max``, ``queue/…``, ``zombies/…`` and
            ``replica/<name>/…``, the last three over the engines' reports, about one a second.
    """
    values: dict[str, list[float]] = defaultdict(list)  # of each metric of trajectories
    for row in trajectories:
        for name, value in row.metrics.items():
            values[name].append(value)
    transcripts = [each for row in trajectories for each in row.transcripts]
    generated = sum(each.generated_length for each in transcripts)
    responses = sum(each.response_length for each in transcripts)
    found: dict[str, float] = {
        "tokens/prompt": sum(each.prompt_length for each in transcripts),
        "tokens/generated": generated,
        "tokens/observation": responses - generated,
        "tokens/trailing_observation": sum(e.trailing_observation_length for e in transcripts),
        **Counter(f"outcomes/{row.outcome}" for row in trajectories),
        **Counter(f"outcomes/{row.outcome}/{row.reason}" for row in trajectories if row.reason),
    }
    for name, numbers in values.items():
        if name in _SUMS:
            found[_SUMS[name]] = sum(numbers)
        elif name.startswith(DRIFT):
            found[name] = len(numbers)
        elif name.startswith("tool/"):
            found[name] = max(numbers) if name.endswith("/seconds_max") else sum(numbers)
    found |= _spread("generation_s", values["generation_s"])
    found |= _spread("tool_s", values["tool_s"])
    found |= _spread("reward", [row.reward for row in trajectories if row.reward is not None])
    if longest := _spread("total_s", values["total_s"]):
        found["trajectory_s/max"] = longest["total_s/max"]
    if trajectories:
        found["turns/mean"] = sum(row.num_turns for row in trajectories) / len(trajectories)
    if generated and (truncated := sum(values["truncated_tokens"])):
        found["sampling/truncated_share"] = truncated / generated
    versions = [v for each in transcripts for span in each.generated_spans() for v in span.versions]
    current, sampled = extra.get("weights/version"), sum(count for _, count in versions)
    if current is not None and sampled:
        behind = sum((current - version) * count for version, count in versions)
        found["staleness/mean"] = behind / sampled
        found["staleness/max"] = current - min(version for version, _ in versions)
    if (batch_s := extra.get("batch_s", 0.0)) > 0:
        found["throughput/tokens_per_s"] = generated / batch_s
        found["throughput/trajectories_per_s"] = len(trajectories) / batch_s
    found |= extra
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not (finite := [value for value in values if math.isfinite(value)]):
        return {}
    mean = math.fsum(finite) / len(finite)
    return {f"{name}/min": min(finite), f"{name}/mean": mean, f"{name}/max": max(finite)}
