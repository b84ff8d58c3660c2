"""A trainer that learns a little: the last norm of the embedded model, by policy gradient."""

import itertools
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM

import rollout
from rollout.batch.advantages import group_relative
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    RolloutConfig,
    SamplingConfig,
    SchedulingConfig,
    TransformersEngine,
)

WORDS = ("rain", "iron", "bread", "glass", "river", "wool", "salt", "lamp")


def config_for(members: int, tokens: int) -> RolloutConfig:
    """The embedded model, for short answers."""
    return RolloutConfig(
        engine=TransformersEngine(dtype="float32"),
        agent=AgentConfig(name="single_turn"),
        lengths=LengthsConfig(prompt=96, response=tokens),
        sampling=SamplingConfig(max_new_tokens=tokens),
        scheduling=SchedulingConfig(samples_per_prompt=members, max_in_flight=2 * members),
        seed=0,
    )


def endless_prompts() -> Iterator[rollout.Prompt]:
    """A data loader without an end."""
    for index in itertools.count():
        word = WORDS[index % len(WORDS)]
        messages = [{"role": "user", "content": f"One short sentence about {word}."}]
        yield rollout.Prompt(messages=messages, uid=f"{index}-{word}", ground_truth=word)


def reward(trajectory: rollout.Trajectory) -> float:
    """Short answers that name the word are good ones."""
    named = trajectory.prompt.ground_truth in trajectory.answer.lower()
    return float(named) - 0.01 * trajectory.generated_length


class Trainer:
    """Has a copy of the model of its own, as a real one has."""

    def __init__(self) -> None:
        path = rollout.resolve_model(rollout.ModelConfig().path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model.requires_grad_(requires_grad=False)
        self._norm = self._model.model.norm.weight.requires_grad_()
        self._optimizer = torch.optim.SGD([self._norm], lr=0.05)

    def learn(self, batch: rollout.RolloutBatch) -> float:
        """One step on a batch; its mean reward."""
        rows, advantages = batch.tensors, group_relative(batch).unsqueeze(1)
        mask = rows["response_mask"].bool() & rows["trainable"].unsqueeze(1)
        logits = self._model(
            input_ids=rows["input_ids"],
            attention_mask=rows["attention_mask"],
            position_ids=rows["position_ids"],
        ).logits[:, -rows["responses"].shape[1] - 1 : -1]
        chosen = rows["responses"].unsqueeze(-1)
        log_probs = logits.float().log_softmax(-1).gather(-1, chosen).squeeze(-1)
        # What was sampled under other weights counts by its ratio to those of now, cut at 2.
        ratio = (log_probs - rows["rollout_log_probs"]).exp().clamp(max=2.0)
        self._optimizer.zero_grad()
        (-(ratio * advantages)[mask].mean()).backward()
        self._optimizer.step()
        return float(torch.nan_to_num(rows["rewards"]).mean())

    def weights(self) -> rollout.TensorWeights:
        """What it has learned, for the engines."""
        return rollout.TensorWeights(self._model.state_dict())
