"""What TRL's real `GRPOTrainer` gets from a runtime, on simulated engines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed here: .venv-trl has it")

import torch
from trl import GRPOTrainer
from trl_material import save_model, trainer_of

from rollout import ConfigError, Outcome, PromptError, Trajectory, function_tool
from rollout.config import LengthsConfig, ModelConfig, SamplingConfig
from rollout.integrations.trainer_rows import RowPolicy
from rollout.integrations.trl import rollout_func, rollout_reward
from rollout.runtime import open_rollout_blocking
from rollout.testing import Scenario, tool_call

LENGTHS = LengthsConfig(prompt=1024, response=512)
SCENARIO = (
    Scenario(seed=1).reply("consult", tool_call("look", at="x")).then("found").reply("", "yes")
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def asks(*texts: str, **columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": each}], **columns} for each in texts]


def config_of(scenario: Scenario = SCENARIO, **sections: Any) -> Any:
    return scenario.config(**{"lengths": LENGTHS, **sections})


@function_tool
def look(at: str) -> str:
    """Look.

    Args:
        at: Where.
    """
    return f"{at} is there"


class Scores:
    """A reward function of TRL's: the member's number; keeps what it was given."""

    __name__ = "scores"

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> list[float]:
        self.given.append(given)
        return [float(each.member) for each in given["trajectory"]]


def train(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """What is logged of each step."""
    trainer.train()
    return [each for each in trainer.state.log_history if "reward" in each]


def seen_by(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """Tensors that the trainer makes of each generation, filled as it trains."""
    seen: list[dict[str, Any]] = []
    make = trainer._generate_and_score_completions

    def noting(inputs: Any) -> Any:
        made = make(inputs)
        seen.append(made)
        return made

    trainer._generate_and_score_completions = noting
    return seen


def test_trl_rows_are_the_tokens_and_log_probs_of_the_engine(model: Path) -> None:
    scores = Scores()
    with rollout_func(config_of(), [look]) as completions:
        trainer = trainer_of(model, completions, asks("consult", "plain"), scores)
        seen = seen_by(trainer)
        (logged,) = train(trainer)
    (given,), (tensors,) = scores.given, seen
    assert len(given["trajectory"]) == 4
    for row, trajectory in enumerate(given["trajectory"]):
        transcript, prompt = trajectory.transcript, trajectory.transcript.prompt_length
        count = transcript.response_length
        ids = torch.cat([tensors["prompt_ids"][row], tensors["completion_ids"][row]])
        kept = torch.cat([tensors["prompt_mask"][row], tensors["completion_mask"][row]]).bool()
        assert ids[kept].tolist() == transcript.ids().tolist()
        assert given["completion_ids"][row] == transcript.ids()[prompt:].tolist()
        sampled = torch.tensor(transcript.mask()[prompt:])
        assert tensors["tool_mask"][row, :count].bool().equal(sampled)
        expected = torch.tensor(transcript.log_probs()[prompt:])
        assert tensors["sampling_per_token_logps"][row, :count].equal(expected)
    assert not tensors["tool_mask"][0].all()  # the tool's answer
    assert "importance_sampling_ratio" in tensors
    assert logged["rollout/outcomes/completed"] == 4
    assert logged["rollout/rows/total"] == 4


def test_trl_groups_are_members_of_one_prompt(model: Path) -> None:
    scores = Scores()
    with rollout_func(config_of()) as completions:
        train(trainer_of(model, completions, asks("a", "a", "b"), scores))
    (given,) = scores.given
    names = [(each.uid, each.member) for each in given["trajectory"]]
    assert names == [(f"train-0.0-{group}", member) for group in range(3) for member in range(2)]
    prompts = [each[-1]["content"] for each in given["prompts"]]
    said = [each.prompt.messages[-1]["content"] for each in given["trajectory"]]
    assert said == prompts  # a prompt that the dataset has twice is two groups


def test_trl_columns_reach_tools_rewards_and_agents(model: Path) -> None:
    seen = []

    def own_reward(trajectory: Trajectory) -> float:
        seen.append((trajectory.prompt.ground_truth, trajectory.prompt.extra))
        trajectory.extra["by_runtime"] = trajectory.member
        return 0.25 + trajectory.member

    def of_trainer(completions: Any, colour: Any, by_runtime: Any, **_: Any) -> list[float]:
        assert colour == ["red"] * 4
        assert by_runtime == [0, 1, 0, 1]
        assert [each[-1]["role"] for each in completions] == ["assistant"] * 4
        assert [each["role"] for each in completions[0]] == ["assistant", "tool", "assistant"]
        assert completions[0][0]["tool_calls"][0]["function"]["arguments"] == {"at": "x"}
        assert completions[0][1]["content"] == "x is there"
        return [1.0, 2.0, 3.0, 4.0]

    rows = asks("consult", "plain", colour="red", ground_truth="42", uid="mine")
    rows[0]["prompt"].insert(0, {"role": "system", "content": "s", "name": None})
    with rollout_func(config_of(), [look], own_reward) as completions:
        trainer = trainer_of(model, completions, rows, [rollout_reward, of_trainer])
        (logged,) = train(trainer)
    assert seen == [("42", {"colour": "red", "uid": "mine"})] * 4
    assert logged["rewards/rollout_reward/mean"] == 0.75
    assert logged["rewards/of_trainer/mean"] == 2.5


def test_trl_row_without_an_answer_is_an_end_token_that_counts_for_nothing(model: Path) -> None:
    scores = Scores()
    rows = asks("plain", "x" * 3000)  # the second one is longer than any prompt may be
    with rollout_func(config_of()) as completions:
        trainer = trainer_of(model, completions, rows, [scores, rollout_reward])
        seen = seen_by(trainer)
        (logged,) = train(trainer)
    (given,), (tensors,) = scores.given, seen
    outcomes = [each.outcome for each in given["trajectory"]]
    assert outcomes == [Outcome.COMPLETED] * 2 + [Outcome.REJECTED] * 2
    eos = trainer.processing_class.eos_token_id
    assert given["completion_ids"][2:] == [[eos], [eos]]
    assert int(tensors["tool_mask"][2:, 0].sum()) == 0
    assert tensors["advantages"][2:].tolist() == [0.0, 0.0]
    assert logged["reward"] == 0.5  # of the two that have one, whatever the others were given
    assert logged["rollout/rows/empty"] == 2
    assert math.isfinite(logged["grad_norm"])
    assert all(bool(each.isfinite().all()) for each in trainer.model.parameters())


def test_trl_weights_are_given_once_a_step(model: Path) -> None:
    scores = Scores()
    with rollout_func(config_of()) as completions:
        trainer = trainer_of(
            model,
            completions,
            asks("a", "b"),
            scores,
            arguments={
                "max_steps": 3,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "steps_per_generation": 1,
            },
        )
        given = []
        updates = completions._give_weights
        completions._give_weights = lambda: (given.append(trainer.state.global_step), updates())[1]
        train(trainer)
        assert completions.runtime is not None
    versions = [
        {int(v) for each in call["trajectory"] for v in each.transcript.weight_versions() if v >= 0}
        for call in scores.given
    ]
    assert versions == [{0}, {0}, {1}, {1}, {2}, {2}]
    assert given == [0, 1, 2]
    uids = [call["trajectory"][0].uid for call in scores.given]
    assert len(set(uids)) == 6  # no two calls of a step share their seeds
    assert completions.runtime is None


def test_trl_evaluation_samples_as_validation(model: Path) -> None:
    scores = Scores()
    scenario = Scenario(seed=1).reply("", *[f"answer {at}" for at in range(40)])
    with rollout_func(config_of(scenario)) as completions:
        trainer = trainer_of(
            model,
            completions,
            asks("a", "b", "c"),
            scores,
            arguments={"num_generations_eval": 3, "per_device_eval_batch_size": 9},
        )
        trainer.eval_dataset = trainer.train_dataset
        figures = trainer.evaluate()
    (given,) = scores.given
    assert [each.uid for each in given["trajectory"]][::3] == [f"eval-0.0-{at}" for at in range(3)]
    assert [each.member for each in given["trajectory"]] == [0, 1, 2] * 3
    assert figures["eval_rollout/rows/total"] == 9


def test_trl_tools_of_the_trainer_run_in_the_runtime(model: Path) -> None:
    from transformers import AutoTokenizer
    from trl import chat_template_utils

    called = []

    def look(at: str) -> str:
        """Look.

        Args:
            at: Where.
        """
        called.append(at)
        return "seen by TRL's own tool"

    tokenizer = AutoTokenizer.from_pretrained(model)
    # TRL wants a template of which it knows how its answers are parsed.
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    scores = Scores()
    with rollout_func(config_of()) as completions:
        trainer = trainer_of(
            model, completions, asks("consult"), scores, tools=[look], tokenizer=tokenizer
        )
        seen = seen_by(trainer)
        train(trainer)
    assert called == ["x", "x"]
    (given,), (tensors,) = scores.given, seen
    assert [each["role"] for each in given["completions"][0]] == ["assistant", "tool", "assistant"]
    assert given["completions"][0][1]["content"] == "seen by TRL's own tool"
    assert not tensors["tool_mask"][0].all()


def test_trl_open_runtime_is_used_and_stays_open(model: Path) -> None:
    with open_rollout_blocking(config_of(), [look]) as runtime:
        with rollout_func(runtime) as completions:
            train(trainer_of(model, completions, asks("consult"), Scores()))
        assert runtime.statistics() is not None
        tokenizer_free = {"tools": [look]}
        with pytest.raises(ConfigError, match="tools: expected none with a runtime that is open"):
            rollout_func(runtime, **tokenizer_free)


def test_trl_text_prompts_are_what_a_user_says(model: Path) -> None:
    scores = Scores()
    with rollout_func(config_of()) as completions:
        train(trainer_of(model, completions, [{"prompt": "a"}, {"prompt": "b"}], scores))
    (given,) = scores.given
    assert [each.messages[0].content for each in given["trajectory"]] == ["a", "a", "b", "b"]
    assert given["completions"][0].startswith("yes")


@pytest.mark.parametrize(
    ("sections", "arguments", "expected"),
    [
        (
            {"sampling": SamplingConfig(temperature=0.5, top_k=4)},
            {},
            [
                "sampling.temperature = 0.5: expected GRPOConfig.temperature = 1.0, or nothing",
                "sampling.top_k = 4: expected GRPOConfig.top_k = 0, or nothing",
            ],
        ),
        (
            {},
            {"max_completion_length": 64},
            [
                "lengths.response = 512: expected at most GRPOConfig.max_completion_length = 64",
            ],
        ),
        (
            {"model": ModelConfig(path="simulated", chat_template_kwargs={"a": 1})},
            {"chat_template_kwargs": {"a": 2}, "generation_kwargs": {"num_beams": 2}},
            [
                "generation_kwargs = {'num_beams': 2}: expected none",
                "chat_template_kwargs = {'a': 2}: expected model.chat_template_kwargs",
            ],
        ),
    ],
)
def test_trl_options_that_contradict_the_configuration_are_refused_by_name(
    model: Path, sections: Any, arguments: Any, expected: list[str]
) -> None:
    with rollout_func(config_of(**sections)) as completions:
        trainer = trainer_of(model, completions, asks("a"), Scores(), arguments=arguments)
        with pytest.raises(ConfigError) as caught:
            trainer.train()
        assert completions.runtime is None
    faults = "\n".join(caught.value.faults)
    assert len(caught.value.faults) == len(expected)
    assert all(each in faults for each in expected)


def test_trl_sampling_of_the_trainer_is_that_of_the_engine(model: Path) -> None:
    scores = Scores()
    with rollout_func(config_of()) as completions:
        arguments = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01}
        train(trainer_of(model, completions, asks("a"), scores, arguments=arguments))
    (given,) = scores.given
    assert given["trajectory"][0].prompt.sampling == {**arguments, "repetition_penalty": 1.0}


def test_trl_dataset_columns_that_cannot_be_used_are_named(model: Path) -> None:
    with rollout_func(config_of()) as completions:
        trainer = trainer_of(model, completions, asks("a", trajectory=1), Scores())
        with pytest.raises(ConfigError, match="column 'trajectory': expected another name"):
            trainer.train()
    with rollout_func(config_of()) as completions:
        trainer = trainer_of(model, completions, asks("a", agent_name=3), Scores())
        with pytest.raises(PromptError, match="agent_name = 3: expected a string"):
            trainer.train()


def test_trl_policy_keeps_what_trl_needs_where_it_says_nothing(model: Path) -> None:
    scores = Scores()
    with rollout_func(config_of(), policy=RowPolicy(untrainable="keep")) as completions:
        trainer = trainer_of(model, completions, asks("a", "b"), scores)
        seen = seen_by(trainer)
        (logged,) = train(trainer)
    assert logged["rollout/rows/masked"] == 0  # the runtime has no reward, and TRL does
    assert seen[0]["tool_mask"].any()


def test_trl_policy_of_several_rows_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        rollout_func("x", policy=RowPolicy(segments="rows"))  # type: ignore[arg-type]
    assert len(caught.value.faults) == 2
    assert "policy.segments = 'rows'" in str(caught.value)
    assert "source = 'x': expected a RolloutConfig" in str(caught.value)


def test_trl_adapters_are_trained_and_the_engines_get_whole_weights(model: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules=["q_proj"], r=2)
    given: list[set[str]] = []

    def noting(*, version: int, source: Any) -> None:
        given.append(set(source.tensors))
        update(version=version, source=source)

    with open_rollout_blocking(config_of()) as runtime, rollout_func(runtime) as completions:
        update, runtime.update_weights = runtime.update_weights, noting  # type: ignore[assignment]
        trainer = trainer_of(
            model,
            completions,
            asks("a", "b"),
            Scores(),
            arguments={"max_steps": 2},
            peft_config=adapter,
        )
        train(trainer)
    names = {name for name in trainer.model.get_base_model().state_dict() if "lora" not in name}
    assert given == [{name.replace(".base_layer", "") for name in names}] * 2
    layer = trainer.model.get_base_model().model.layers[0].self_attn.q_proj
    assert not layer.merged  # it learns on beside its base
