"""OpenRLHF 0.11.2 (PyPI): what ``openrlhf/utils/agent.py`` returns, and what
`_process_response_into_experience` of ``openrlhf/trainer/ppo_utils/samples_generator.py`` reads.
"""

from __future__ import annotations

from typing import Any

KEYS = {
    "prompt",
    "label",
    "images",
    "mm_train_inputs",
    "reward",
    "scores",
    "observation_tokens",
    "action_ranges",
    "rollout_log_probs",
    "truncated",
    "extra_logs",
}


def check(responses: list[dict[str, Any]]) -> None:
    """Whole sequences, ranges within them, and numbers alone in the logs: the same for all."""
    for response in responses:
        assert set(response) == KEYS
        ids, log_probs = response["observation_tokens"], response["rollout_log_probs"]
        assert all(isinstance(token, int) for token in ids)
        assert log_probs is None or len(log_probs) == len(ids)
        stop = 1  # the first token has no log-prob to learn
        for first, last in response["action_ranges"]:
            assert stop <= first < last <= len(ids)
            stop = last
        assert isinstance(response["reward"], float)
        assert response["reward"] == response["reward"]
        assert isinstance(response["scores"], float)
        assert isinstance(response["truncated"], bool)
        assert all(isinstance(value, float) for value in response["extra_logs"].values())
    assert len({tuple(response["extra_logs"]) for response in responses}) == 1
