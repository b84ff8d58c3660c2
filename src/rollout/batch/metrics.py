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
_SUMMED = {
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
#: With which figures of one tool begin.
TOOL = "tool/"


def batch_metrics(
    trajectories: Sequence[Trajectory], extra: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of a batch by name; durations in seconds, tokens summed over trajectories.

    * ``generation_s/{min,mean,max}``, ``tool_s/{min,mean,max}``: over trajectories;
      ``trajectory_s/max``: of the slowest one;
    * ``tokens/{prompt,generated,observation}``, and ``tokens/trailing_observation``: those
      observations that nothing answered, which the tensors leave out;
    * ``outcomes/<outcome>`` and ``outcomes/<outcome>/<reason>``: how many ended so;
    * ``recovery/{resumes,restarts}``: requests that resumed elsewhere, or restarted, because their
      replica was lost; ``tokens/discarded``: what was dropped by that and by further attempts;
      ``tokens/cut_prompt``: what over-long prompts have lost;
    * ``sampling/truncated_share``: of the generated tokens, those of training rows that were drawn
      under top_k, top_p or min_p; absent where none were;
    * ``media/sampled_placeholders``: turns that ended before a placeholder of an image or a video
      that the model sampled by itself; what followed is in ``tokens/discarded``;
    * ``gateway/pinned_calls``: calls of clients whose sampling `gateway.sampling` "pin" overrode;
    * ``tokenization/<kind>``: where `agent.tokenization_check` is on, how many compared so;
    * ``reward/{min,mean,max}``: over known rewards; ``turns/mean``;
    * ``tool/<tool>/{calls,errors,seconds,seconds_max}`` and ``tool_calls``, ``tool_errors``;
    * ``staleness/{mean,max}``: by how many versions the weights are newer now than those that
      sampled, over sampled tokens;
    * ``throughput/{tokens_per_s,trajectories_per_s}``: where ``batch_s`` is known.

    Args:
        extra: What was measured while the call ran: ``batch_s``, ``weights/version`` (of the
            engines now), ``loop_lag_s/max``, ``loop_starved_s/max``, ``queue/…``, ``zombies/…`` and
            ``replica/<name>/…``, the last three over the engines' reports, about one a second.
    """
    names = ("prompt", "generated", "observation", "trailing_observation")
    found: dict[str, float] = defaultdict(float, {f"tokens/{name}": 0 for name in names})
    sampled_by: Counter[int] = Counter()  # tokens by the version of their weights
    seconds: dict[str, list[float]] = {"generation_s": [], "tool_s": [], "total_s": []}
    truncated = 0.0
    for row in trajectories:
        found[f"outcomes/{row.outcome}"] += 1
        if row.reason:
            found[f"outcomes/{row.outcome}/{row.reason}"] += 1
        for transcript in row.transcripts:
            generated = transcript.generated_length
            found["tokens/prompt"] += transcript.prompt_length
            found["tokens/generated"] += generated
            found["tokens/observation"] += transcript.response_length - generated
            found["tokens/trailing_observation"] += transcript.trailing_observation_length
            for span in transcript.generated_spans():
                for version, count in span.versions:
                    sampled_by[version] += count
        for name, value in row.metrics.items():
            if name in _SUMMED:
                found[_SUMMED[name]] += value
            elif name in seconds:
                seconds[name].append(value)
            elif name == "truncated_tokens":
                truncated += value
            elif name.startswith(DRIFT):
                found[name] += 1
            elif name.startswith(TOOL) and name.endswith("/seconds_max"):
                found[name] = max(found.get(name, 0.0), value)
            elif name.startswith(TOOL):
                found[name] += value
    found |= _spread("generation_s", seconds["generation_s"])
    found |= _spread("tool_s", seconds["tool_s"])
    found |= _spread("reward", [row.reward for row in trajectories if row.reward is not None])
    if longest := _spread("trajectory_s", seconds["total_s"]):
        found["trajectory_s/max"] = longest["trajectory_s/max"]
    if trajectories:
        found["turns/mean"] = sum(row.num_turns for row in trajectories) / len(trajectories)
    if truncated and found["tokens/generated"]:
        found["sampling/truncated_share"] = truncated / found["tokens/generated"]
    current = extra.get("weights/version")
    if current is not None and sampled_by.total():
        behind = sum((current - version) * count for version, count in sampled_by.items())
        found["staleness/mean"] = behind / sampled_by.total()
        found["staleness/max"] = current - min(sampled_by)
    if (batch_s := extra.get("batch_s", 0.0)) > 0:
        found["throughput/tokens_per_s"] = found["tokens/generated"] / batch_s
        found["throughput/trajectories_per_s"] = len(trajectories) / batch_s
    found |= extra
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return {}
    mean = math.fsum(finite) / len(finite)
    return {f"{name}/min": min(finite), f"{name}/mean": mean, f"{name}/max": max(finite)}
