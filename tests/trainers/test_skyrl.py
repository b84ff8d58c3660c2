"""SkyRL itself takes what our generator gives."""

from __future__ import annotations

import sys
import typing
import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import typing_extensions

import every_outcome as given
from rollout import AgentLoop
from rollout.agents import register_agent
from rollout.config import AgentConfig
from rollout.errors import ConfigError
from rollout.integrations.row_policy import RowPolicy
from rollout.integrations.trainer_settings import TrainerSettings
from rollout.testing import Scenario
from test_skyrl_output import generator_input, output_of
from trainers.contracts import skyrl as contract


@pytest.fixture
def skyrl() -> Any:
    """SkyRL's own code, where it is installed."""
    if find_spec("skyrl") is None:
        pytest.skip("skyrl is not installed; see docs/trainers/skyrl.md")
    if sys.version_info < (3, 12):  # it hands its TypedDicts to pydantic, which takes these only
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
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
    main = 1 if step_wise else 0  # the last row of the first trajectory
    assert output["env_metrics"][main]["weight_versions"] == [7, 8]
    assert output["rollout_metrics"]["rollout/outcomes/failed"] == 2
    assert output["rollout_metrics"]["generate/avg_num_tokens"] > 0


@register_agent("planner")
class Planner(AgentLoop):
    """Has a helper of its own reward; the first member succeeds, the third fails."""

    async def run(self, context: Any) -> None:
        member = context.identity.member
        await context.generate()
        async with context.open_segment([{"role": "user", "content": "helper"}]) as helper:
            await helper.generate(max_new_tokens=2)  # cut by length
            helper.reward = 0.25
        context.observe([{"role": "user", "content": "go on"}])
        await context.generate()
        if member == 2:
            raise RuntimeError("the tool is gone")
        context.reward = 1.0 if member == 0 else 0.0


@pytest.mark.parametrize("zeroes", [False, True])
def test_skyrl_itself_learns_steps_from_the_reward_of_the_main_conversation(
    skyrl: Any, zeroes: bool
) -> None:
    import numpy as np
    import torch
    from skyrl.backends.skyrl_train.utils import ppo_utils

    from rollout.integrations.skyrl import RolloutGenerator

    scenario = Scenario(seed=1).reply("helper", "a long answer").reply("", "x")
    config = scenario.config(agent=AgentConfig(name="planner"))
    batch: Any = {
        "prompts": [[{"role": "user", "content": "q"}]] * 3,
        "env_classes": ["e"] * 3,
        "env_extras": [{}] * 3,
        "sampling_params": {},
        "trajectory_ids": [SimpleNamespace(instance_id="a", repetition_id=at) for at in range(3)],
        "batch_metadata": SimpleNamespace(global_step=1, training_phase="train"),
    }
    generator = RolloutGenerator(
        TrainerSettings(config=config, engines="config"),
        step_wise=True,
        zero_reward_on_non_stop=zeroes,
    )
    try:
        output: Any = anyio.run(generator.generate, batch)
    finally:
        generator.close()
    skyrl.validate.validate_generator_output(3, output, step_wise=True)
    contract.check(output, 3, step_wise=True)
    purposes = [metrics["purpose"] for metrics in output["env_metrics"]]
    assert purposes == ["subagent", "main"] * 3
    assert output["stop_reasons"] == ["length", "stop"] * 2 + ["length", "abort"]
    rewards = torch.tensor(output["rewards"])[torch.tensor(output["is_last_step"])]
    assert rewards.tolist() == [1.0, 0.0, 0.5]
    # As its trainer does in step-wise training: last rows alone.
    advantages, _ = ppo_utils.compute_advantages_and_returns(
        token_level_rewards=rewards[:, None],
        response_mask=torch.ones(3, 1),
        index=np.array(["a"] * 3),
        adv_estimator="grpo",
        values=None,
        config=None,
        gamma=1,
        lambd=1,
        grpo_norm_by_std=False,
    )
    assert advantages[:, 0].tolist() == pytest.approx([0.5, -0.5, 0.0])


def test_generator_refuses_what_skyrl_would_learn_from(skyrl: Any) -> None:
    from rollout.integrations.skyrl import RolloutGenerator

    with pytest.raises(ConfigError, match=r"policy.unrewarded = 'nan': SkyRL does not leave out"):
        RolloutGenerator(given.settings(policy=RowPolicy(unrewarded="nan")))
    theirs = given.settings(engines="trainer")
    with pytest.raises(ConfigError, match="names no servers"):
        RolloutGenerator(theirs)
    with pytest.raises(ConfigError, match="enable_return_routed_experts = True: SkyRL's servers"):
        RolloutGenerator(theirs, server_urls=["http://127.0.0.1:1"], wants_experts=True)


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
            inference_engine=SimpleNamespace(enable_return_routed_experts=True),
            step_wise_trajectories=True,
            zero_reward_on_non_stop=False,
            apply_overlong_filtering=False,
        ),
        trainer=SimpleNamespace(policy=SimpleNamespace(model=SimpleNamespace(path="simulated"))),
    )
    exp = RolloutExp.__new__(RolloutExp)
    exp._rollout_settings = given.settings()
    exp.get_generator(cfg, None, client).close()
