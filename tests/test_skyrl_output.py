"""What SkyRL is given keeps its contract; `tests/trainers` has its own code take it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from types import SimpleNamespace
from typing import Any

import pytest

import every_outcome as given
from rollout import Outcome, Trajectory
from rollout.chat.trajectory import Parent, Segment
from rollout.errors import ConfigError
from rollout.integrations.adapter import PlacedRows
from rollout.integrations.row_policy import RowPolicy
from rollout.integrations.skyrl.output import generator_output, policy_for, prompts_of
from rollout.integrations.trainer_rows import trainer_rows
from trainers.contracts import skyrl as contract


def placed(*, step_wise: bool) -> PlacedRows:
    """`every_outcome`, as the adapter hands it on."""
    trajectories = given.every_outcome()
    policy = policy_for(RowPolicy(), step_wise=step_wise)
    made = trainer_rows(trajectories, policy, eos_token_id=given.EOS)
    places = [trajectories.index(row.trajectory) for row in made.rows]
    return PlacedRows(rows=made.rows, places=places, metrics=made.metrics)


def identities() -> list[Any]:
    """Those of two groups of four."""
    return [
        SimpleNamespace(instance_id=f"group-{at // 4}", repetition_id=at % 4) for at in range(8)
    ]


def output_of(*, step_wise: bool, **options: bool) -> dict[str, Any]:
    rows = placed(step_wise=step_wise)
    return generator_output(
        rows.rows, identities(), rows.places, rows.metrics, step_wise=step_wise, **options
    )


@pytest.mark.parametrize("step_wise", [False, True])
def test_output_of_every_outcome_keeps_the_contract(step_wise: bool) -> None:
    contract.check(output_of(step_wise=step_wise), 8, step_wise=step_wise)


def test_output_maps_spans_masks_versions_and_stop_reasons() -> None:
    output = output_of(step_wise=False)
    assert output["response_ids"][0] == [60, 61, 2, 50, 51, 52, 61, 62, 2]
    assert output["loss_masks"][0] == [1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert output["rollout_logprobs"][0][2:7] == [-0.125, 0.0, 0.0, 0.0, -0.5]
    assert output["env_metrics"][0]["weight_versions"] == [7, 8]
    assert output["stop_reasons"] == [
        *("stop", "length", "length", "length"),
        *("abort", "abort", "abort", "stop"),
    ]
    # Those that nothing may be learned from have the mean of their group and mask 0.
    assert output["rewards"] == [1.0, 0.0, 0.5, 0.25, 1.0, 1.0, 1.0, 1.0]
    assert [any(mask) for mask in output["loss_masks"]] == [True] * 4 + [False] * 3 + [True]


def test_output_of_several_segments_is_step_wise_only() -> None:
    assert len(output_of(step_wise=False)["rewards"]) == 8
    output = output_of(step_wise=True)
    assert output["is_last_step"] == [False] + [True] * 8
    assert output["trajectory_ids"][0] is output["trajectory_ids"][1]
    assert [each["purpose"] for each in output["env_metrics"][:2]] == ["side", "main"]


def test_output_follows_the_generator_options_of_skyrl() -> None:
    output = output_of(step_wise=False, zero_reward_on_non_stop=True, apply_overlong_filtering=True)
    # What stands for the unknown rewards of the second group stays its mean.
    assert output["rewards"] == [1.0] + [0.0] * 3 + [1.0] * 4
    assert [any(mask) for mask in output["loss_masks"]] == [True] + [False] * 6 + [True]


def group_output(members: Sequence[dict[str, Any]], **options: bool) -> dict[str, Any]:
    """One group of these trajectories."""
    trajectories = [
        Trajectory(uid="a", group=0, member=at, outcome=Outcome.COMPLETED, **each)
        for at, each in enumerate(members)
    ]
    policy = policy_for(RowPolicy(), step_wise=options.get("step_wise", False))
    made = trainer_rows(trajectories, policy, eos_token_id=given.EOS)
    places = [trajectories.index(row.trajectory) for row in made.rows]
    return generator_output(made.rows, None, places, made.metrics, **options)


def main_and_helper(own: float, **helper: Any) -> dict[str, Any]:
    """A trajectory whose main conversation opened another."""
    transcript = given.transcript(turns=1, finish=helper.pop("finish", "stop"))
    parent = Parent(0, 4)
    other = Segment(transcript=transcript, parent=parent, purpose="subagent", **helper)
    return {"reward": own, "segments": [Segment(transcript=given.transcript()), other]}


def last_rewards(output: dict[str, Any]) -> list[float]:
    """What SkyRL looks at in step-wise training."""
    return list(compress(output["rewards"], output["is_last_step"]))


def test_last_row_of_a_trajectory_is_its_main_one_whatever_a_helper_earned() -> None:
    output = group_output(
        [main_and_helper(1.0, reward=0.25), main_and_helper(0.0, reward=0.25)], step_wise=True
    )
    assert output["rewards"] == [0.25, 1.0, 0.25, 0.0]
    assert last_rewards(output) == [1.0, 0.0]


def test_last_row_after_a_compaction_is_the_one_in_which_the_main_conversation_ends() -> None:
    segments = [
        Segment(transcript=given.transcript()),
        Segment(transcript=given.transcript(turns=1), parent=Parent(0, 4), purpose="compaction"),
        Segment(transcript=given.transcript(turns=1), parent=Parent(1, 4), purpose="subagent"),
    ]
    output = group_output([{"reward": 1.0, "segments": segments}], step_wise=True)
    purposes = [each["purpose"] for each in output["env_metrics"]]
    assert purposes == ["main", "subagent", "compaction"]
    assert output["is_last_step"] == [False, False, True]


def test_helper_cut_by_length_leaves_the_reward_of_its_trajectory() -> None:
    output = group_output(
        [main_and_helper(1.0, finish="length")], step_wise=True, zero_reward_on_non_stop=True
    )
    assert output["stop_reasons"] == ["length", "stop"]
    assert output["rewards"] == [0.0, 1.0]


def test_group_mean_stays_where_it_is_after_rewards_were_zeroed() -> None:
    cut = {"reward": 1.0, "transcript": given.transcript(finish="length")}
    failed = {"transcript": given.transcript(), "trainable": False}
    members = [{"reward": 1.0, "transcript": given.transcript()}, cut, failed]
    assert group_output(members)["rewards"] == [1.0, 1.0, 1.0]
    assert group_output(members, zero_reward_on_non_stop=True)["rewards"] == [1.0, 0.0, 0.5]


def test_group_mean_of_several_rows_is_that_of_last_ones() -> None:
    failed = {"transcript": given.transcript(), "trainable": False}
    members = [main_and_helper(1.0), {"reward": 0.0, "transcript": given.transcript()}, failed]
    assert last_rewards(group_output(members, step_wise=True)) == [1.0, 0.0, 0.5]


def test_zeros_of_a_policy_stay_zeros() -> None:
    trajectories = given.every_outcome()
    policy = RowPolicy(unrewarded="zero", segments="last")
    made = trainer_rows(trajectories, policy, eos_token_id=given.EOS)
    output = generator_output(made.rows, None, range(8), {}, unrewarded="zero")
    assert output["rewards"][4:] == [0.0, 0.0, 0.0, 1.0]


def generator_input(**changes: Any) -> dict[str, Any]:
    """Each ending twice, of one group each; as `prepare_generator_input` makes it."""
    endings = [ending for ending in given.ENDINGS for _ in range(2)]
    return {
        "prompts": [given.messages(ending) for ending in endings],
        "env_classes": ["gsm8k"] * len(endings),
        "env_extras": [
            {"ending": ending, "reward_spec": {"ground_truth": "4"}} for ending in endings
        ],
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 0,
            "max_tokens": 500,
            "min_p": 0.0,
            "min_tokens": 1,
            "logprobs": 1,
            "skip_special_tokens": True,
            "stop": None,
        },
        "trajectory_ids": [
            SimpleNamespace(instance_id=ending, repetition_id=at % 2)
            for at, ending in enumerate(endings)
        ],
        "batch_metadata": SimpleNamespace(global_step=3, training_phase="train"),
        **changes,
    }


def test_input_becomes_groups_with_one_stable_key() -> None:
    repeated = prompts_of(generator_input())
    assert [prompt.uid for prompt in repeated.prompts] == list(given.ENDINGS)
    assert repeated.places[1] == [2, 3]
    prompt = repeated.prompts[0]
    assert prompt.ground_truth == "4"
    assert prompt.extra == {"ending": "completed", "env_class": "gsm8k"}
    assert prompt.sampling == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "max_new_tokens": 500,
        "min_p": 0.0,
    }


def test_input_without_ids_is_grouped_by_adjacent_equal_prompts() -> None:
    repeated = prompts_of(generator_input(trajectory_ids=None))
    assert [list(places) for places in repeated.places] == [[2 * n, 2 * n + 1] for n in range(7)]


def test_input_whose_env_class_is_an_agent_runs_that_agent() -> None:
    repeated = prompts_of(generator_input(env_classes=["every_outcome"] * 14))
    assert repeated.prompts[0].agent_name == "every_outcome"


def test_input_with_a_setting_that_engines_lack_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"sampling_params.stop = \['</answer>'\]: engines here"):
        prompts_of(generator_input(sampling_params={"stop": ["</answer>"]}))
