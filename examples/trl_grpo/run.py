"""TRL's `GRPOTrainer` learns which key opens which door: the task of `examples/grpo`.

python examples/trl_grpo/run.py [--steps 40] [--seed 0] [--out DIR]

Needs TRL: `make .venv-trl/.ready` makes an environment with it, `.venv-trl/bin/python`. The last
line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollout.integrations.trl import rollout_func, rollout_reward

sys.path.insert(0, str(Path(__file__).parents[1] / "grpo"))
import doors  # its configuration, its tool and its reward
import tiny_model


class Progress(TrainerCallback):
    """A line a step, in the place of all that TRL logs."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """TRL has logged something."""
        if "reward" in logs:
            print(f"step {state.global_step}: reward {logs['reward']:.2f}", flush=True)


def arguments(directory: str, steps: int, seed: int) -> GRPOConfig:
    """All colours in each step, and what else the loop without TRL has.

    With beta, which it has not, the form of a call holds until rewards say something, and a colour
    for which all members try the same wrong key gets out of that.
    """
    return GRPOConfig(
        output_dir=directory,
        max_steps=steps,
        seed=seed,
        per_device_train_batch_size=len(tiny_model.COLOURS) * doors.MEMBERS,
        num_generations=doors.MEMBERS,
        max_completion_length=tiny_model.RESPONSE,
        learning_rate=2e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=8,
        beta=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(directory: str, steps: int, seed: int) -> list[dict[str, Any]]:
    """What TRL logs of each step."""
    tiny_model.save_tiny_model(Path(directory), seed)
    rows = [
        {"prompt": [{"role": "user", "content": tiny_model.question(each)}], "colour": each}
        for each in tiny_model.COLOURS
    ]
    config = doors.config_for(directory, seed)
    with rollout_func(config, [doors.keys_for(seed)], doors.reward) as completions:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(directory),
            reward_funcs=rollout_reward,
            rollout_func=completions,
            args=arguments(directory, steps, seed),
            train_dataset=Dataset.from_list(rows),
            callbacks=[Progress()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [each for each in trainer.state.log_history if "reward" in each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="for result.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # such a small model gains nothing from more
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        logged = train(directory, asked.steps, asked.seed)
    tenth = max(1, len(logged) // 10)
    ratios = [each["sampling/importance_sampling_ratio/mean"] for each in logged]
    result = {
        "trl_reward_last": sum(each["reward"] for each in logged[-tenth:]) / tenth,
        "trl_ratio_mean": sum(ratios) / len(ratios),
    }
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "result.json").write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
