"""What slime is given keeps its contract; `tests/trainers` has its own code take it."""

from __future__ import annotations

from typing import Any

import every_outcome as given
from rollout.integrations.adapter import PlacedRows
from rollout.integrations.row_policy import RowPolicy
from rollout.integrations.slime.samples import groups_of, prompts_of, samples_of
from rollout.integrations.trainer_rows import trainer_rows
from trainers.contracts import slime as contract


def placed(policy: RowPolicy) -> PlacedRows:
    trajectories = given.every_outcome()
    made = trainer_rows(trajectories, policy, eos_token_id=given.EOS)
    places = [trajectories.index(row.trajectory) for row in made.rows]
    return PlacedRows(rows=made.rows, places=places, metrics=made.metrics)


def asked(sample_type: Any) -> list[Any]:
    """Samples as slime's data source makes them: two groups of four."""
    return [
        sample_type(group_index=at // 4, index=at, prompt="consult", label="4") for at in range(8)
    ]


def words(ids: Any) -> str:
    return " ".join(map(str, ids))


def groups(sample_type: Any, policy: RowPolicy | None = None, **options: bool) -> list[Any]:
    samples = asked(sample_type)
    return groups_of(samples, samples_of(samples, placed(policy or RowPolicy()), words, **options))


def test_samples_of_every_outcome_keep_the_contract() -> None:
    contract.check(groups(contract.Sample), given.LAYERS, given.TOP_K)


def test_samples_map_spans_masks_versions_status_and_text() -> None:
    made = groups(contract.Sample, RowPolicy(segments="last"))
    assert [len(group) for group in made] == [4, 4]
    flat = contract.flat(made)
    first = flat[0]
    assert first.tokens == [10, 11, 12, 13, 60, 61, 2, 50, 51, 52, 61, 62, 2]
    assert first.loss_mask == [1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert first.rollout_log_probs[2:7] == [-0.125, 0.0, 0.0, 0.0, -0.5]
    assert first.weight_versions == ["7", "8"]
    assert first.response == "60 61 2 50 51 52 61 62 2"
    assert [sample.status.value for sample in flat] == [
        *("completed", "truncated", "truncated", "truncated"),
        *("aborted", "failed", "failed", "completed"),
    ]
    assert [sample.reward for sample in flat] == [1.0, 0.0, 0.5, 0.25, 1.0, 1.0, 1.0, 1.0]
    assert [sample.remove_sample for sample in flat] == [False] * 4 + [True] * 3 + [False]
    assert flat[4].rollout_log_probs == [-0.5, -0.25, -0.125]
    assert flat[4].loss_mask == [0, 0, 0]


def test_samples_of_several_segments_share_a_rollout_and_nest_all_groups() -> None:
    made = groups(contract.Sample)
    assert [sample.metadata["rollout"]["purpose"] for sample in made[0][0]] == ["side", "main"]
    assert [sample.rollout_id for sample in made[0][0]] == [0, 0]
    assert all(isinstance(rows, list) for group in made for rows in group)


def test_samples_without_reward_are_left_to_slime_where_it_gives_rewards() -> None:
    trajectories = given.every_outcome()
    trajectories[1].reward = None
    policy = RowPolicy(segments="last", unrewarded="trainer")
    made = trainer_rows(trajectories, policy, eos_token_id=given.EOS)
    rows = PlacedRows(rows=made.rows, places=list(range(8)), metrics={})
    flat = samples_of(asked(contract.Sample), rows, words, keeps_reward=False)
    assert [rows[0].reward is None for rows in flat] == [
        False,
        True,
        False,
        False,
        *[True] * 3,
        False,
    ]
    assert [rows[0].remove_sample for rows in flat] == [*[False] * 4, *[True] * 3, False]


def test_prompts_are_grouped_by_group_index_and_carry_label_and_metadata() -> None:
    samples = asked(contract.Sample)
    samples[0].metadata = {"ending": "completed", "tools": [{"type": "function"}]}
    repeated = prompts_of(samples, {"temperature": 1.0, "top_k": -1, "skip_special_tokens": False})
    assert [list(places) for places in repeated.places] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    prompt = repeated.prompts[0]
    assert (prompt.uid, prompt.ground_truth) == ("group-0", "4")
    assert prompt.messages == [{"role": "user", "content": "consult"}]
    assert prompt.extra == {"ending": "completed", "tool_schemas": [{"type": "function"}]}
