"""SkyRL takes what our generator gives: by its contract, and by its own code where it is."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from rollout.errors import ConfigError, PromptError
from rollout.integrations.adapter import PlacedRows
from rollout.integrations.row_policy import RowPolicy
from rollout.integrations.skyrl.output import generator_output, policy_for, prompts_of
from rollout.integrations.trainer_rows import trainer_rows

from . import every_outcome as given
from .contracts import skyrl as contract

if sys.version_info < (3, 12):  # SkyRL hands its TypedDicts to pydantic, which takes these only
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]


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
    assert output["env_metrics"][1]["purpose"] == "side"


def test_output_follows_the_generator_options_of_skyrl() -> None:
    output = output_of(step_wise=False, zero_reward_on_non_stop=True, apply_overlong_filtering=True)
    assert output["rewards"] == [1.0] + [0.0] * 6 + [1.0]
    assert [any(mask) for mask in output["loss_masks"]] == [True] + [False] * 6 + [True]


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


def test_input_with_a_wrong_column_is_refused_by_name() -> None:
    extras = [{"agent_name": 3}] * 14
    with pytest.raises(PromptError, match="agent_name = 3: expected a string"):
        prompts_of(generator_input(env_extras=extras))


@pytest.fixture
def skyrl() -> Any:
    """SkyRL's own code, where it is installed."""
    if find_spec("skyrl") is None:
        pytest.skip("skyrl is not installed; see docs/trainers/skyrl.md")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from skyrl.train.dataset import preprocess
        from skyrl.train.generators import base, utils
        from skyrl.train.utils import trainer_utils
    return SimpleNamespace(base=base, utils=utils, validate=trainer_utils, tensors=preprocess)


@pytest.mark.parametrize("step_wise", [False, True])
def test_skyrl_itself_takes_the_output_of_every_outcome(skyrl: Any, step_wise: bool) -> None:
    output = output_of(step_wise=step_wise)
    assert set(output) == set(skyrl.base.GeneratorOutput.__annotations__)
    skyrl.validate.validate_generator_output(8, output, step_wise=step_wise)
    whole = skyrl.utils.concatenate_generator_outputs([output], step_wise=step_wise)
    assert whole["rewards"] == output["rewards"]
    assert whole["rollout_metrics"]["rollout/rows/total"] == len(output["rewards"])


def test_skyrl_itself_makes_tensors_of_the_output(skyrl: Any) -> None:
    output = output_of(step_wise=True)
    rewards = [[0.0] * (len(ids) - 1) + [r] for ids, r in paired(output)]
    sequences, _, _, _, masks, log_probs, experts = (
        skyrl.tensors.convert_prompts_responses_to_batch_tensors(
            SimpleNamespace(pad_token_id=0, padding_side="left"),
            output["prompt_token_ids"],
            output["response_ids"],
            rewards,
            output["loss_masks"],
            output["rollout_logprobs"],
            output["rollout_expert_indices"],
        )
    )
    assert masks.sum() == sum(map(sum, output["loss_masks"]))
    assert log_probs[0].sum() == pytest.approx(sum(output["rollout_logprobs"][0]))
    assert experts.shape == (*sequences.shape, given.LAYERS, given.TOP_K)
    assert experts[0].max() == 1


def paired(output: dict[str, Any]) -> list[tuple[list[int], float]]:
    return list(zip(output["response_ids"], output["rewards"], strict=True))


@pytest.mark.parametrize("step_wise", [False, True])
def test_generator_runs_a_batch_of_every_ending_in_the_order_of_the_input(
    skyrl: Any, step_wise: bool
) -> None:
    from rollout.integrations.skyrl import RolloutGenerator

    batch = generator_input()
    generator = RolloutGenerator(given.settings(), step_wise=step_wise)
    try:
        output: Any = anyio.run(generator.generate, batch)
    finally:
        generator.close()
    assert isinstance(generator, skyrl.base.GeneratorInterface)
    contract.check(output, 14, step_wise=step_wise)
    skyrl.validate.validate_generator_output(14, output, step_wise=step_wise)
    outcomes = [
        (metrics["outcome"], identity.instance_id)
        for metrics, identity in zip(output["env_metrics"], output["trajectory_ids"], strict=True)
    ]
    assert all(outcome == ending for outcome, ending in outcomes)
    assert len(outcomes) == (16 if step_wise else 14)
    assert output["env_metrics"][0]["weight_versions"] == [7, 8]
    assert output["rollout_metrics"]["rollout/outcomes/failed"] == 2
    assert output["rollout_metrics"]["generate/avg_num_tokens"] > 0


def test_generator_of_two_sizes_of_groups_keeps_the_order(skyrl: Any) -> None:
    from rollout.integrations.skyrl import RolloutGenerator

    batch = {
        name: value[:5] if isinstance(value, list) else value
        for name, value in generator_input().items()
    }
    generator = RolloutGenerator(given.settings())
    try:
        output: Any = anyio.run(generator.generate, batch)
    finally:
        generator.close()
    assert [metrics["outcome"] for metrics in output["env_metrics"]] == [
        *("completed", "completed", "length", "length", "limit")
    ]


def test_generator_refuses_what_skyrl_would_learn_from(skyrl: Any) -> None:
    from rollout.integrations.skyrl import RolloutGenerator

    with pytest.raises(ConfigError, match=r"policy.unrewarded = 'nan': SkyRL does not leave out"):
        RolloutGenerator(given.settings(policy=RowPolicy(unrewarded="nan")))
    with pytest.raises(ConfigError, match="names no servers"):
        RolloutGenerator(given.settings(engines="trainer"))


def test_entry_point_is_skyrl_s_experiment_with_our_generator(skyrl: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from skyrl.train.entrypoints.main_base import BasePPOExp

        from rollout.integrations.skyrl import RolloutExp, main
        from rollout.integrations.skyrl.entrypoint import server_urls, split_arguments

    assert issubclass(RolloutExp, BasePPOExp)
    assert callable(main)
    assert split_arguments(["a.b=1", "rollout=mine:settings"]) == ("mine:settings", ["a.b=1"])
    with pytest.raises(ConfigError, match="once, got it 0 times"):
        split_arguments(["a.b=1"])
    client = SimpleNamespace(server_urls=["http://one", "http://two"])
    assert server_urls(client) == ["http://one", "http://two"]
    cfg = SimpleNamespace(
        generator=SimpleNamespace(
            step_wise_trajectories=True,
            zero_reward_on_non_stop=False,
            apply_overlong_filtering=False,
        ),
        trainer=SimpleNamespace(policy=SimpleNamespace(model=SimpleNamespace(path="simulated"))),
    )
    exp = RolloutExp.__new__(RolloutExp)
    exp._rollout_settings = given.settings()
    exp.get_generator(cfg, None, client).close()
