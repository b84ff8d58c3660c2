"""SkyRL 0.3.0 (PyPI): ``skyrl/train/generators/base.py`` and, of
``skyrl/train/utils/trainer_utils.py``, `validate_generator_output`.
"""

from __future__ import annotations

from typing import Any

#: Of `GeneratorOutput`; those in the second set may be None.
REQUIRED = {"prompt_token_ids", "response_ids", "rewards", "loss_masks"}
OPTIONAL = {
    "stop_reasons",
    "rollout_metrics",
    "rollout_logprobs",
    "trajectory_ids",
    "trajectory_generation_times",
    "rollout_expert_indices",
    "is_last_step",
    "env_metrics",
    "pixel_values",
    "image_grid_thw",
}


def check(output: dict[str, Any], prompts: int, *, step_wise: bool) -> None:
    """One entry a row everywhere; masks, log-probs and rewards of tokens as long as responses."""
    assert set(output) == REQUIRED | OPTIONAL
    rows = len(output["response_ids"])
    assert rows
    assert step_wise or rows == prompts
    for name in (REQUIRED | OPTIONAL) - {"rollout_metrics"}:
        assert output[name] is None or len(output[name]) == rows, name
    assert all(isinstance(reward, float) and reward == reward for reward in output["rewards"])
    for row, ids in enumerate(output["response_ids"]):
        assert ids
        assert output["prompt_token_ids"][row]
        assert len(output["loss_masks"][row]) == len(output["rollout_logprobs"][row]) == len(ids)
        assert set(output["loss_masks"][row]) <= {0, 1}
        experts = (output["rollout_expert_indices"] or [[]] * rows)[row]
        assert len(experts) in (0, len(ids) + len(output["prompt_token_ids"][row]))
        assert all(expert >= 0 for token in experts for layer in token for expert in layer)
    if step_wise:
        _check_steps(output)


def _check_steps(output: dict[str, Any]) -> None:
    """A trajectory's rows stand together, and the last of them says so."""
    ids = [(each.instance_id, each.repetition_id) for each in output["trajectory_ids"]]
    ends = output["is_last_step"]
    assert ends[-1]
    seen = set()
    for row, name in enumerate(ids[:-1]):
        assert ends[row] == (ids[row + 1] != name)
        if ends[row]:
            assert name not in seen
            seen.add(name)
