"""slime takes our samples: by its contract, and by its own code where it is."""

from __future__ import annotations

import warnings
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from rollout.errors import ConfigError
from rollout.integrations.adapter import PlacedRows
from rollout.integrations.row_policy import RowPolicy
from rollout.integrations.slime.samples import groups_of, prompts_of, samples_of
from rollout.integrations.trainer_rows import trainer_rows

from . import every_outcome as given
from .contracts import slime as contract


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
    assert [sample.metadata["rollout"]["purpose"] for sample in made[0][0]] == ["main", "side"]
    assert [sample.rollout_id for sample in made[0][0]] == [0, 0]
    assert all(isinstance(rows, list) for group in made for rows in group)


def test_samples_without_reward_are_left_to_slime_s_model_where_it_has_one() -> None:
    policy = RowPolicy(segments="last")
    trajectories = given.every_outcome()
    trajectories[1].reward = None
    made = trainer_rows(trajectories, policy, eos_token_id=given.EOS)
    rows = PlacedRows(rows=made.rows, places=list(range(8)), metrics={})
    flat = samples_of(asked(contract.Sample), rows, words, keeps_reward=False)
    # What failed is not judged: it has the policy's reward, and nothing is learned from it.
    assert [rows[0].reward is None for rows in flat] == [False, True] + [False] * 6


def test_prompts_are_grouped_by_group_index_and_carry_label_and_metadata() -> None:
    samples = asked(contract.Sample)
    samples[0].metadata = {"ending": "completed", "tools": [{"type": "function"}]}
    repeated = prompts_of(samples, {"temperature": 1.0, "top_k": -1, "skip_special_tokens": False})
    assert [list(places) for places in repeated.places] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    prompt = repeated.prompts[0]
    assert (prompt.uid, prompt.ground_truth) == ("group-0", "4")
    assert prompt.messages == [{"role": "user", "content": "consult"}]
    assert prompt.extra == {"ending": "completed", "tool_schemas": [{"type": "function"}]}


@pytest.fixture(scope="session")
def slime() -> Any:
    """slime's own code, where it can be imported, and the loop that it never ends."""
    if find_spec("slime") is None:
        pytest.skip("slime is not installed; see docs/trainers/slime.md")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from slime.observability import rollout_data_utils
        from slime.rollout import base_types
        from slime.utils import async_utils, types
    async_utils.get_async_loop()
    return SimpleNamespace(types=types, base=base_types, checks=rollout_data_utils)


def test_slime_itself_takes_samples_of_every_outcome(slime: Any) -> None:
    made = groups(slime.types.Sample)
    contract.check(made, given.LAYERS, given.TOP_K)
    slime.checks.validate_rollout_id_annotated(made)
    experts = [sample.rollout_routed_experts for sample in contract.flat(made)]
    args = Namespace(num_layers=given.LAYERS, moe_router_topk=given.TOP_K)
    slime.checks.validate_rollout_routed_experts_for_replay(
        [each for each in experts if each is not None and each.count_nonzero()], args
    )
    for sample in contract.flat(made):
        sample._validate_response_metadata_lengths()
        assert slime.types.Sample.from_dict(sample.to_dict()).tokens == sample.tokens


def arguments(**changes: Any) -> Namespace:
    """Those of slime that its rollout reads."""
    return Namespace(
        **{
            "rollout_settings": given.settings,
            "rollout_batch_size": len(given.ENDINGS),
            "n_samples_per_prompt": 2,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "rollout_max_response_len": 500,
            "rollout_stop": None,
            "rollout_stop_token_ids": None,
            "partial_rollout": False,
            "group_rm": False,
            "rm_type": None,
            "custom_rm_path": None,
            "reward_key": None,
            "dynamic_sampling_filter_path": None,
            "rollout_sample_filter_path": None,
            "rollout_all_samples_process_path": None,
            **changes,
        }
    )


class DataSource:
    """Groups of two, one for each ending in turn."""

    def __init__(self, sample_type: Any) -> None:
        self._type = sample_type
        self._given = 0

    def get_samples(self, count: int) -> list[list[Any]]:
        made = []
        for _ in range(count):
            group, ending = self._given, given.ENDINGS[self._given % len(given.ENDINGS)]
            self._given += 1
            made.append(
                [
                    self._type(
                        group_index=group,
                        index=2 * group + member,
                        prompt=given.messages(ending),
                        metadata={"ending": ending},
                    )
                    for member in range(2)
                ]
            )
        return made


@pytest.fixture
def functions(slime: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import rollout.integrations.slime as ours

        ours.generate_rollout  # noqa: B018  (imports slime)
    yield ours
    ours.close()


def test_generate_rollout_gives_slime_a_batch_of_every_ending(slime: Any, functions: Any) -> None:
    output = functions.generate_rollout(arguments(), 3, DataSource(slime.types.Sample))
    assert isinstance(output, slime.base.RolloutFnTrainOutput)
    contract.check(output.samples, given.LAYERS, given.TOP_K)
    slime.checks.validate_rollout_id_annotated(output.samples)
    outcomes = [
        [sample.metadata["rollout"]["outcome"] for sample in contract.flat(group)]
        for group in output.samples
    ]
    assert [sorted(set(group)) for group in outcomes] == [[ending] for ending in given.ENDINGS]
    assert [len(group) for group in outcomes] == [4] + [2] * 6
    assert output.samples[0][0][0].weight_versions == ["7", "8"]
    assert output.metrics["rollout/outcomes/failed"] == 2


def zero_reward(args: Namespace, samples: list[Any], **_: Any) -> bool:
    """A dynamic filter: whether any member got something."""
    return any(sample.reward for sample in samples)


async def judge(args: Namespace, sample: Any, **_: Any) -> float:
    """slime's reward model."""
    return 0.5 if sample.metadata["ending"] == "limit" else 0.0


def test_generate_rollout_uses_slime_s_reward_model_and_dynamic_filter(
    slime: Any, functions: Any
) -> None:
    args = arguments(
        rollout_settings=lambda: given.settings(reward=None, policy=RowPolicy(segments="last")),
        rollout_batch_size=2,
        custom_rm_path=f"{__name__}.judge",
        dynamic_sampling_filter_path=f"{__name__}.zero_reward",
    )
    output = functions.generate_rollout(args, 0, DataSource(slime.types.Sample))
    endings = [[sample.metadata["ending"] for sample in group] for group in output.samples]
    assert endings == [["limit", "limit"]] * 2
    assert [[sample.reward for sample in group] for group in output.samples] == [[0.5, 0.5]] * 2


def test_generate_runs_one_sample_with_its_segments(slime: Any, functions: Any) -> None:
    source = DataSource(slime.types.Sample)
    sample = source.get_samples(1)[0][0]
    sampling = {"temperature": 1.0, "max_new_tokens": 500, "stop": None, "sampling_seed": 4}
    trained = anyio.run(partial(functions.generate, arguments(), sample, sampling))
    assert [each.rollout_id for each in trained] == [0, 0]
    assert sample.tokens == []
    checked = anyio.run(partial(functions.generate, arguments(), sample, sampling, evaluation=True))
    assert isinstance(checked, slime.types.Sample)
    assert checked.status is slime.types.Sample.Status.COMPLETED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rollout": True}, "args.partial_rollout = True"),
        ({"rollout_top_p": 0.9}, "args.rollout_top_p = 0.9"),
        ({"rollout_stop": ["x"]}, r"sampling_params.stop = \['x'\]"),
        ({"rollout_settings": None}, "args.rollout_settings: not set"),
        ({"rollout_settings": "nowhere:settings"}, "No module named 'nowhere'"),
    ],
)
def test_generate_rollout_refuses_by_name_what_it_cannot_do(
    slime: Any, functions: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        functions.generate_rollout(arguments(**changes), 0, DataSource(slime.types.Sample))
