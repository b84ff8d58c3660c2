"""What OpenRLHF is given keeps its contract; `tests/trainers` has its own code take it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import every_outcome as given
from rollout.errors import ConfigError
from rollout.integrations.openrlhf.response import policy_for, prompt_of_arguments, response_of
from rollout.integrations.row_policy import RowPolicy
from rollout.integrations.trainer_rows import trainer_rows
from trainers.contracts import openrlhf as contract


def responses(*, has_log_probs: bool = True) -> list[dict[str, Any]]:
    """`every_outcome`, one response a trajectory."""
    made = trainer_rows(given.every_outcome(), policy_for(RowPolicy()), eos_token_id=given.EOS)
    return [
        response_of(row, prompt="p", label="4", images=None, has_log_probs=has_log_probs)
        for row in made.rows
    ]


@pytest.mark.parametrize("has_log_probs", [False, True])
def test_responses_of_every_outcome_keep_the_contract(has_log_probs: bool) -> None:
    made = responses(has_log_probs=has_log_probs)
    assert len(made) == 8
    contract.check(made)
    assert all((each["rollout_log_probs"] is not None) == has_log_probs for each in made)


def test_response_maps_spans_to_ranges_over_the_whole_sequence() -> None:
    made = responses()
    assert made[0]["observation_tokens"] == [10, 11, 12, 13, 60, 61, 2, 50, 51, 52, 61, 62, 2]
    assert made[0]["action_ranges"] == [(4, 7), (10, 13)]
    assert made[0]["rollout_log_probs"][3:8] == [0.0, -0.5, -0.25, -0.125, 0.0]
    assert made[0]["extra_logs"]["weight_version_max"] == 8.0
    assert [each["truncated"] for each in made] == [False, *[True] * 3, *[False] * 4]
    assert [bool(each["action_ranges"]) for each in made] == [*[True] * 4, *[False] * 3, True]
    assert [each["reward"] for each in made] == [1.0, 0.0, 0.5, 0.25, 1.0, 1.0, 1.0, 1.0]


class Params(SimpleNamespace):
    """The settings of vLLM's that OpenRLHF makes."""

    def __init__(self, **changes: Any) -> None:
        made = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 500, "logprobs": 1}
        super().__init__(**{**made, "min_tokens": 1, "stop": [], **changes})


def test_prompt_is_a_user_s_text_or_messages_as_json() -> None:
    said = prompt_of_arguments("What is 2+2?", "4", Params(), None)
    assert said.messages == [{"role": "user", "content": "What is 2+2?"}]
    assert said.ground_truth == "4"
    assert said.sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 500}
    told = prompt_of_arguments('[{"role": "system", "content": "Hi"}]', "", Params(), None)
    assert told.messages == [{"role": "system", "content": "Hi"}]
    assert prompt_of_arguments("[1] is a list", "", Params(), None).messages[0]["role"] == "user"


def test_prompt_with_a_setting_that_engines_lack_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"sampling_params.min_tokens = 5: engines here"):
        prompt_of_arguments("hi", "", Params(min_tokens=5), None)
