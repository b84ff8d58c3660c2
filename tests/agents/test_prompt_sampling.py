"""How prompts are sampled: what they say themselves, in training and in validation."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import attrs
import pytest

import rollout
from rollout import AgentContext, AgentLoop, Outcome, Prompt, Trajectory, register_agent
from rollout.agents.prompt_sampling import make_sampling
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    RolloutConfig,
    SamplingConfig,
    SGLangEngine,
    config_from_dict,
    dump_config,
)
from rollout.engine.core import SamplingParams
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio


def params(
    config: RolloutConfig, overrides: dict[str, Any] | None = None, *, validate: bool = False
) -> SamplingParams:
    return make_sampling(config, overrides or {}, validate=validate)


TRAINING = SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=64, stop_token_ids=(5, 6))


# A prompt's temperature


def test_sampling_greedy_of_a_prompt_wins_over_every_temperature() -> None:
    assert params(RolloutConfig(), {"greedy": True}).temperature == 0.0
    assert params(RolloutConfig(), {"greedy": True, "temperature": 0.3}).temperature == 0.0


def test_sampling_prompt_without_a_temperature_leaves_greedy_alone() -> None:
    config = RolloutConfig(sampling=SamplingConfig(greedy=True))
    assert params(config, {"top_p": 0.5}).temperature == 0.0
    assert params(config, {"greedy": False}).temperature == 1.0


@register_agent("prompt_sampling_noting")
class Noting(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        context.extra["temperature"] = context.sampling.temperature
        await context.generate()


async def test_sampling_temperature_of_a_prompt_reaches_its_trajectory() -> None:
    config = Scenario(seed=1).config(
        sampling=SamplingConfig(greedy=True, max_new_tokens=8),
        agent=AgentConfig(name="prompt_sampling_noting"),
    )
    greedy = Prompt(messages=[{"role": "user", "content": "x"}])
    hot = Prompt(messages=greedy.messages, sampling={"temperature": 0.9})
    async with rollout.open_rollout(config) as runtime:
        for validate in (False, True):
            batch = await runtime.generate([greedy, hot], validate=validate)
            assert [row.extra["temperature"] for row in batch.samples] == [0.0, 0.9]


# Validation


def test_validation_by_default_is_greedy_and_takes_the_rest_from_sampling() -> None:
    config = RolloutConfig(sampling=TRAINING)
    assert config.validation_sampling.greedy
    found = params(config, validate=True)
    assert (found.temperature, found.top_p) == (0.0, 0.9)
    assert (found.max_new_tokens, found.stop_token_ids) == (64, (5, 6))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0.3}, {"temperature": 0.3}),
        ({"max_new_tokens": 9}, {"max_new_tokens": 9}),
        ({"temperature": 1.0, "stop_token_ids": ()}, {"temperature": 1.0, "stop_token_ids": ()}),
        ({"greedy": True, "top_p": 1.0}, {"temperature": 0.0, "top_p": 1.0}),
        ({"max_new_tokens": None}, {"max_new_tokens": 4096}),  # written out: no bound of its own
        ({}, {}),
    ],
)
def test_validation_fields_left_out_take_the_value_of_sampling(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    data = dump_config(RolloutConfig(sampling=TRAINING)) | {"validation_sampling": given}
    for config in (
        RolloutConfig(sampling=TRAINING, validation_sampling=SamplingConfig(**given)),
        config_from_dict(data),
    ):
        training = params(config)
        found = params(config, validate=True)
        for name in SamplingParams.__struct_fields__:
            assert getattr(found, name) == expected.get(name, getattr(training, name)), name


def test_validation_temperature_alone_samples_though_training_is_greedy() -> None:
    config = RolloutConfig(
        sampling=SamplingConfig(greedy=True), validation_sampling=SamplingConfig(temperature=0.5)
    )
    assert not config.validation_sampling.greedy
    assert params(config, validate=True).temperature == 0.5


def test_validation_settings_follow_sampling_through_dumps_overrides_and_evolve(
    tmp_path: Path,
) -> None:
    config = RolloutConfig(
        sampling=TRAINING, validation_sampling=SamplingConfig(greedy=True, top_k=4)
    )
    dumped = dump_config(config)
    assert dumped["validation_sampling"] == {"top_k": 4, "greedy": True}
    assert config_from_dict(dumped) == config
    dumped["sampling"]["max_new_tokens"] = 7
    assert config_from_dict(dumped).validation_sampling.max_new_tokens == 7
    other = attrs.evolve(config, sampling=SamplingConfig(max_new_tokens=8))
    assert other.validation_sampling.max_new_tokens == 8
    assert other.validation_sampling.top_k == 4


def test_validation_fault_that_comes_from_sampling_is_named_once() -> None:
    with pytest.raises(rollout.ConfigError) as caught:
        RolloutConfig(engine=SGLangEngine(), sampling=SamplingConfig(repetition_penalty=1.2))
    assert [fault.partition(" = ")[0] for fault in caught.value.faults] == [
        "sampling.repetition_penalty"
    ]


# A prompt longer than the engine's context


async def told(context_length: int, caplog: pytest.LogCaptureFixture) -> list[Trajectory]:
    scenario = Scenario(seed=1).capacity(context_length=context_length)
    config = scenario.config(lengths=LengthsConfig(prompt=4096, response=512))
    prompts = [
        Prompt(messages=[{"role": "user", "content": text}], uid=text[0])
        for text in ("x" * 300, "y")
    ]
    with caplog.at_level(logging.WARNING, "rollout"):
        async with rollout.open_rollout(config, reward=lambda trajectory: 1.0) as runtime:
            return (await runtime.generate(prompts)).trajectories


async def test_prompt_longer_than_the_context_is_rejected_and_not_trained_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    long, short = await told(128, caplog)
    assert (long.outcome, long.reason) == (Outcome.REJECTED, "context_length")
    assert (long.trainable, long.reward, len(long.transcript)) == (False, None, 0)
    assert (short.trainable, short.reward) == (True, 1.0)
    assert caplog.messages == [
        "x/0 rejected (context_length): the prompt has 319 tokens; the engine's context of 128 "
        "leaves no room (1 trajectory)"
    ]


@pytest.mark.parametrize(("spare", "outcome"), [(0, Outcome.REJECTED), (1, Outcome.LENGTH)])
async def test_prompt_is_taken_where_the_context_has_room_for_one_token_of_an_answer(
    spare: int, outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    long, _ = await told(319 + spare, caplog)
    assert long.outcome is outcome
    assert long.transcript.generated_length == spare
