"""A policy finds out which key opens which door: GRPO in plain torch over `open_rollout`.

python examples/grpo/run.py [--steps 45] [--seed 0] [--backend trio] [--out DIR]

The last line is the result as JSON; DIR gets it too, with a plot (matplotlib).
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time  # noqa: TID251  (what a step takes)
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import torch
from tiny_model import COLOURS, PROMPT, RESPONSE, answer_of, key_of, question, save_tiny_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import rollout
from rollout.advantages import group_relative
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    ModelConfig,
    RolloutConfig,
    SchedulingConfig,
    TransformersEngine,
)
from rollout.tools import Tool, function_tool

if TYPE_CHECKING:
    from tensordict import TensorDict

MEMBERS = 16
LEARNING_RATE, BETAS, CLIP = 2e-3, (0.9, 0.95), 0.2
#: Steps until the learning rate is whole: Adam's first ones are as long as any, however little the
#: first rewards say.
WARM_UP = 8


def config_for(directory: str, seed: int) -> RolloutConfig:
    """The embedded engine serves the model; the trainer has its own copy of it."""
    return RolloutConfig(
        model=ModelConfig(path=directory),
        engine=TransformersEngine(dtype="float32", max_running=len(COLOURS) * MEMBERS),
        lengths=LengthsConfig(prompt=PROMPT, response=RESPONSE),
        agent=AgentConfig(tool_format="pythonic", max_assistant_turns=2),
        scheduling=SchedulingConfig(samples_per_prompt=MEMBERS),
        seed=seed,
    )


def keys_for(seed: int) -> Tool:
    """The tool: which key opens which door is hidden in it."""

    @function_tool
    async def unlock(door: str, key: str) -> str:
        """Try a key on a door.

        Args:
            door: Its colour.
            key: Its shape.
        """
        fits = key == key_of(door, seed)
        return answer_of(door, is_open=fits)

    return unlock


def reward(trajectory: rollout.Trajectory) -> float:
    """1 where the door that the prompt names was opened."""
    wanted = answer_of(trajectory.prompt.extra["colour"], is_open=True)
    return float(any(each.content == wanted for each in trajectory.messages))


def prompts_of(step: int) -> list[rollout.Prompt]:
    """All colours."""
    return [
        rollout.Prompt(
            messages=[{"role": "user", "content": question(colour)}],
            uid=f"{step}-{colour}",
            extra={"colour": colour},
        )
        for colour in COLOURS
    ]


def log_probs_of(model: torch.nn.Module, rows: TensorDict) -> torch.Tensor:
    """(B, R) float32: of each response token under the model, at temperature 1."""
    width = rows["responses"].shape[1]
    logits = model(
        input_ids=rows["input_ids"],
        attention_mask=rows["attention_mask"],
        position_ids=rows["position_ids"],
    ).logits[:, -width - 1 : -1]
    chosen = rows["responses"].unsqueeze(-1)
    return logits.float().log_softmax(-1).gather(-1, chosen).squeeze(-1)


def learn(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: rollout.RolloutBatch
) -> float:
    """One step on one batch; the largest difference of an importance ratio from 1 before it."""
    rows, advantages = batch.tensors, group_relative(batch).unsqueeze(1)
    mask = rows["response_mask"].bool() & rows["trainable"].unsqueeze(1)
    ratio = (log_probs_of(model, rows) - rows["rollout_log_probs"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    optimizer.zero_grad()
    (-gain[mask].mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float((ratio.detach()[mask] - 1).abs().max())


async def train(directory: str, steps: int, seed: int) -> dict[str, list[float]]:
    """Generate, learn, give the engine the new weights; what each step said and took."""
    save_tiny_model(Path(directory), seed)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
    curves: dict[str, list[float]] = {
        name: [] for name in ("reward", "ratio_error", "generate_s", "learn_s", "weights_s")
    }
    async with rollout.open_rollout(
        config_for(directory, seed), [keys_for(seed)], reward
    ) as runtime:
        for step in range(steps):
            times = [time.perf_counter()]
            batch = await runtime.generate(prompts_of(step), step=step)
            times.append(time.perf_counter())
            error = await anyio.to_thread.run_sync(learn, model, optimizer, batch)
            warm_up.step()
            times.append(time.perf_counter())
            weights = rollout.TensorWeights(model.state_dict())
            await runtime.update_weights(version=step + 1, source=weights)
            times.append(time.perf_counter())
            mean = float(torch.nan_to_num(batch.tensors["rewards"]).mean())
            spans = [after - before for before, after in pairwise(times)]
            for name, value in zip(curves, [mean, error, *spans], strict=True):
                curves[name].append(value)
            print(f"step {step}: reward {mean:.2f}", flush=True)
    return curves


def summary_of(curves: dict[str, list[float]]) -> dict[str, float]:
    """First and last tenth of the rewards, and what it all took, the engine included."""
    rewards, tenth = curves["reward"], max(1, len(curves["reward"]) // 10)
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "first_tenth": sum(rewards[:tenth]) / tenth,
        "last_tenth": sum(rewards[-tenth:]) / tenth,
        "steps": len(rewards),
        "cpu_s": sum(use.ru_utime + use.ru_stime for use in uses),
        "ratio_max_error": max(curves["ratio_error"]),
    } | {name: sum(curves[name]) for name in ("generate_s", "learn_s", "weights_s")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("trio", "asyncio"), default="trio")
    parser.add_argument("--out", type=Path, help="for result.json and curves.png")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # such a small model gains nothing from more
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        curves = anyio.run(train, directory, asked.steps, asked.seed, backend=asked.backend)
    result = summary_of(curves)
    if asked.out is not None:
        from plots import save_curves

        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "result.json").write_text(json.dumps(result | {"curves": curves}))
        save_curves(asked.out / "curves.png", curves)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
