"""A policy finds out which key opens which door: GRPO in plain torch over `open_rollout`.

python examples/grpo/run.py [--steps 45] [--seed 0] [--backend trio] [--out DIR]

`doors.py` has the task: what is asked, the tool and the reward.

The last line is the result as JSON; DIR gets it too, with a plot (matplotlib).
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time  # noqa: TID251  (what a step takes)
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import attrs
import torch
from doors import config_for, keys_for, prompts_of, reward
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import rollout
from rollout.batch.advantages import group_relative
from rollout.config import RolloutConfig
from rollout.tools import Tool

if TYPE_CHECKING:
    from tensordict import TensorDict

LEARNING_RATE, BETAS, CLIP = 2e-3, (0.9, 0.95), 0.2
#: About as long as most gradients are here: Adam makes a large step of one that is much longer than
#: those before it.
CLIP_NORM = 0.1
#: Steps until the learning rate is whole: Adam's first ones are as long as any, however little the
#: first rewards say. In the last third it falls to nothing: where nearly all succeed, gradients are
#: small, and at the whole rate one odd answer makes a step that can undo all.
WARM_UP = 8


@attrs.frozen(kw_only=True)
class Task:
    """What is learned: a model, tools, a reward, and the prompts of each step."""

    config: RolloutConfig
    tools: list[Tool]
    reward: Callable[[rollout.Trajectory], object]
    prompts: Callable[[int], list[rollout.Prompt]]
    learning_rate: float = LEARNING_RATE
    #: Of a forward and backward pass: memory bounds it, and the result is the same.
    rows_at_once: int = 1024


def log_probs_of(model: torch.nn.Module, rows: TensorDict) -> torch.Tensor:
    """(B, R) float32: of each response token under the model, at temperature 1."""
    logits = model(
        input_ids=rows["input_ids"],
        attention_mask=rows["attention_mask"],
        position_ids=rows["position_ids"],
        logits_to_keep=rows["responses"].shape[1] + 1,
    ).logits[:, :-1]
    chosen = rows["responses"].unsqueeze(-1)
    return logits.float().log_softmax(-1).gather(-1, chosen).squeeze(-1)


def learn(
    task: Task,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: rollout.RolloutBatch,
) -> float:
    """One step on one batch; the largest difference of an importance ratio from 1 before it."""
    rows, advantages = batch.tensors, group_relative(batch).unsqueeze(1)
    mask = rows["response_mask"].bool() & rows["trainable"].unsqueeze(1)
    errors = []
    optimizer.zero_grad()
    for at in torch.arange(len(rows)).split(task.rows_at_once):
        part, kept = rows[at], mask[at]
        ratio = (log_probs_of(model, part) - part["rollout_log_probs"]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        gain = torch.minimum(ratio * advantages[at], clipped * advantages[at])
        (-gain[kept].sum() / mask.sum().clamp(min=1)).backward()
        errors += (ratio.detach()[kept] - 1).abs().tolist()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    return max(errors, default=0.0)


async def train(task: Task, steps: int) -> dict[str, list[float]]:
    """Generate, learn, give the engine the new weights; what each step said and took."""
    directory = rollout.resolve_model(task.config.model.path)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, betas=BETAS)

    def rate(step: int) -> float:
        return min((step + 1) / WARM_UP, 3 * (steps - step) / steps, 1.0)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    curves: dict[str, list[float]] = {
        name: [] for name in ("reward", "ratio_error", "generate_s", "learn_s", "weights_s")
    }
    async with rollout.open_rollout(task.config, task.tools, task.reward) as runtime:
        for step in range(steps):
            times = [time.perf_counter()]
            batch = await runtime.generate(task.prompts(step), step=step, trim=True)
            times.append(time.perf_counter())
            error = await anyio.to_thread.run_sync(learn, task, model, optimizer, batch)
            schedule.step()
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


def run(task: Task, asked: argparse.Namespace) -> None:
    """Train, and say how it went."""
    torch.set_num_threads(1)  # such small models gain nothing from more
    logging.disable_progress_bar()
    curves = anyio.run(train, task, asked.steps, backend=asked.backend)
    result = summary_of(curves)
    if asked.out is not None:
        from plots import save_curves

        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "result.json").write_text(json.dumps(result | {"curves": curves}))
        save_curves(asked.out / "curves.png", curves)
    print(json.dumps(result))


def options(steps: int) -> argparse.ArgumentParser:
    """Those of every task."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("trio", "asyncio"), default="trio")
    parser.add_argument("--out", type=Path, help="for result.json and curves.png")
    return parser


def main() -> None:
    asked = options(45).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        save_tiny_model(Path(directory), asked.seed)
        config, tools = config_for(directory, asked.seed), [keys_for(asked.seed)]
        run(Task(config=config, tools=tools, reward=reward, prompts=prompts_of), asked)


if __name__ == "__main__":
    main()
