"""A row as the response of an executor, and its arguments as a prompt. Imports no OpenRLHF.

Written after OpenRLHF 0.11.2's ``openrlhf/utils/agent.py``, and
``openrlhf/trainer/ppo_utils/samples_generator.py``, which reads the response.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from rollout.integrations.prompt_media import with_media
from rollout.integrations.repeated_prompts import prompt_of_columns, sampling_of_trainer
from rollout.integrations.row_media import features_of
from rollout.integrations.row_values import runs_of, versions_of
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.integrations.repeated_prompts import PromptOf
    from rollout.integrations.row_policy import RowPolicy
    from rollout.integrations.trainer_row import TrainerRow
    from rollout.media.processor import MediaProcessor
    from rollout.types import Prompt

#: What is read of vLLM's sampling settings.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "bad_words",
)


def policy_for(policy: RowPolicy) -> RowPolicy:
    """An executor returns one row a trajectory."""
    return attrs.evolve(policy, segments="last") if policy.segments == "rows" else policy


def prompt_of_arguments(
    prompt: str,
    label: Any,
    sampling_params: Any,
    prompt_of: PromptOf | None,
    images: Any = None,
) -> Prompt:
    """What `execute` was called with, as a prompt.

    The columns are ``prompt``, a text that a user says or messages as JSON, and ``ground_truth``,
    the label. Images stand in the prompt where it has places for them, or before it.

    Raises:
        PromptError, ConfigError: A column or a sampling setting is none of what it may be.
    """
    given = {name: getattr(sampling_params, name, None) for name in SAMPLING}
    sampling = sampling_of_trainer(given, "sampling_params")
    shown = images if isinstance(images, list | tuple) else [images]
    said = with_media(_messages(prompt) or prompt, [each for each in shown if each is not None])
    columns = {"prompt": said, "ground_truth": label}
    return prompt_of_columns(columns, prompt_of, sampling)


def response_of(
    row: TrainerRow,
    *,
    prompt: str,
    label: Any,
    images: Any,
    has_log_probs: bool,
    processor: MediaProcessor | None = None,
) -> dict[str, Any]:
    """The keys that OpenRLHF reads, over the whole sequence: prompt and response.

    ``action_ranges`` are the runs of tokens to be learned, ``(start, stop)``: none where nothing
    is. The numbers of ``extra_logs`` are the same for every row, as OpenRLHF stacks them.

    Args:
        row: The row of the trajectory.
        prompt, label, images: As `execute` got them.
        has_log_probs: Whether `sampling_params.logprobs` asked for log-probs.
        processor: The model's, for `mm_train_inputs`: what its images and videos become.
    """
    begin = len(row.prompt_ids)
    return {
        "prompt": prompt,
        "label": label,
        "images": images,
        "mm_train_inputs": features_of(row, processor),
        "observation_tokens": [*row.prompt_ids.tolist(), *row.response_ids.tolist()],
        "action_ranges": [
            (begin + start, begin + stop) for start, stop, flag in runs_of(row.mask) if flag
        ],
        "rollout_log_probs": [0.0] * begin + row.log_probs.tolist() if has_log_probs else None,
        "truncated": row.stop_reason == "length",
        "reward": float(row.reward),
        "scores": float(row.reward),
        "extra_logs": _logs(row),
    }


def _logs(row: TrainerRow) -> dict[str, float]:
    trajectory, versions = row.trajectory, versions_of(row) or [-1]
    return {
        "num_turns": float(trajectory.num_turns),
        "tool_s": float(trajectory.metrics.get("tool_s", 0.0)),
        "generation_s": float(trajectory.metrics.get("generation_s", 0.0)),
        "is_rewarded": float(row.is_rewarded),
        "is_trainable": float(row.is_trainable),
        "weight_version_min": float(min(versions)),
        "weight_version_max": float(max(versions)),
        **{f"is_{outcome}": float(trajectory.outcome is outcome) for outcome in Outcome},
    }


def _messages(text: str) -> list[dict[str, Any]] | None:
    """The conversation that a text is the JSON of; None for any other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        said = json.loads(text)
    except ValueError:
        return None
    is_conversation = said and all(isinstance(each, dict) and "role" in each for each in said)
    return said if is_conversation else None
