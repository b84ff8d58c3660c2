"""Figures about a batch. What is unknown is absent: no -1, no NaN."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from rollout.types import DRIFT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rollout.chat.trajectory import Trajectory


#: Sums over trajectories, with the names of the metrics that they sum up.
_SUMMED = {
    "recovery/resumes": "resumes",
    "recovery/restarts": "restarts",
    "tokens/discarded": "discarded_tokens",
    "tokens/cut_prompt": "cut_prompt_tokens",
    "tokens/cached": "cached_tokens",
    "media/sampled_placeholders": "sampled_placeholders",
    "gateway/pinned_calls": "pinned_calls",
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
    metrics = {
        **_spread("generation_s", _known(trajectories, "generation_s")),
        **_spread("tool_s", _known(trajectories, "tool_s")),
        **_spread("reward", (row.reward for row in trajectories if row.reward is not None)),
        **_tokens(trajectories),
        **_outcomes(trajectories),
        **_sums(trajectories, _SUMMED),
        **_truncation(trajectories),
        **_tools(trajectories),
        **_staleness(trajectories, extra),
        **Counter(name for row in trajectories for name in row.metrics if name.startswith(DRIFT)),
        **extra,
    }
    longest = _spread("trajectory_s", _known(trajectories, "total_s"))
    metrics |= {name: value for name, value in longest.items() if name.endswith("/max")}
    if trajectories:
        metrics["turns/mean"] = sum(row.num_turns for row in trajectories) / len(trajectories)
    metrics |= _throughput(metrics, len(trajectories))
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _sums(trajectories: Sequence[Trajectory], names: Mapping[str, str]) -> dict[str, float]:
    """Sums of trajectories' metrics, by the names that they have in a batch."""
    known = {name: list(_known(trajectories, each)) for name, each in names.items()}
    return {name: math.fsum(values) for name, values in known.items() if values}


def _truncation(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    truncated = math.fsum(_known(trajectories, "truncated_tokens"))
    generated = sum(row.generated_length for row in trajectories)
    return {"sampling/truncated_share": truncated / generated} if truncated and generated else {}


def _tools(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Sums of what trajectories say of each tool, and the longest call."""
    found: dict[str, float] = {}
    for row in trajectories:
        for name, value in row.metrics.items():
            if name.endswith("/seconds_max") and name.startswith(TOOL):
                found[name] = max(found.get(name, 0.0), value)
            elif name.startswith(TOOL):
                found[name] = found.get(name, 0.0) + value
    return found


def _staleness(trajectories: Sequence[Trajectory], extra: Mapping[str, float]) -> dict[str, float]:
    current = extra.get("weights/version")
    if current is None:
        return {}
    tokens: Counter[int] = Counter()
    for row in trajectories:
        for transcript in row.transcripts:
            for count, version in transcript.runs():
                if version is not None:
                    tokens[version] += count
    if not tokens:
        return {}
    old = math.fsum((current - version) * count for version, count in tokens.items())
    return {
        "staleness/mean": old / tokens.total(),
        "staleness/max": current - min(tokens),
    }


def _throughput(metrics: Mapping[str, float], count: int) -> dict[str, float]:
    seconds = metrics.get("batch_s", 0.0)
    if seconds <= 0:
        return {}
    return {
        "throughput/tokens_per_s": metrics["tokens/generated"] / seconds,
        "throughput/trajectories_per_s": count / seconds,
    }


def _known(trajectories: Sequence[Trajectory], name: str) -> Iterable[float]:
    return (row.metrics[name] for row in trajectories if name in row.metrics)


def _spread(name: str, values: Iterable[float]) -> dict[str, float]:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return {}
    mean = math.fsum(finite) / len(finite)
    return {f"{name}/min": min(finite), f"{name}/mean": mean, f"{name}/max": max(finite)}


def _tokens(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    transcripts = [transcript for row in trajectories for transcript in row.transcripts]
    prompt = sum(transcript.prompt_length for transcript in transcripts)
    response = sum(transcript.response_length for transcript in transcripts)
    generated = sum(transcript.generated_length for transcript in transcripts)
    trailing = sum(transcript.trailing_observation_length for transcript in transcripts)
    return {
        "tokens/prompt": prompt,
        "tokens/generated": generated,
        "tokens/observation": response - generated,
        "tokens/trailing_observation": trailing,
    }


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    counts = Counter(f"outcomes/{row.outcome}" for row in trajectories)
    counts.update(f"outcomes/{row.outcome}/{row.reason}" for row in trajectories if row.reason)
    return dict(counts)
