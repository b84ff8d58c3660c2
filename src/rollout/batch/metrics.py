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
}


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
    * ``tokenization/<kind>``: where `agent.tokenization_check` is on, how many compared so;
    * ``reward/{min,mean,max}``: over known rewards; ``turns/mean``.
    """
    metrics = {
        **_spread("generation_s", _known(trajectories, "generation_s")),
        **_spread("tool_s", _known(trajectories, "tool_s")),
        **_spread("reward", (row.reward for row in trajectories if row.reward is not None)),
        **_tokens(trajectories),
        **_outcomes(trajectories),
        **_sums(trajectories, _SUMMED),
        **Counter(name for row in trajectories for name in row.metrics if name.startswith(DRIFT)),
        **extra,
    }
    longest = _spread("trajectory_s", _known(trajectories, "total_s"))
    metrics |= {name: value for name, value in longest.items() if name.endswith("/max")}
    if trajectories:
        metrics["turns/mean"] = sum(row.num_turns for row in trajectories) / len(trajectories)
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _sums(trajectories: Sequence[Trajectory], names: Mapping[str, str]) -> dict[str, float]:
    """Sums of trajectories' metrics, by the names that they have in a batch."""
    known = {name: list(_known(trajectories, each)) for name, each in names.items()}
    return {name: math.fsum(values) for name, values in known.items() if values}


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
