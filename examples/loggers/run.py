"""The metrics of batches in a trainer's logger: TensorBoard, MLflow, or Weights & Biases offline.

python examples/loggers/run.py tensorboard

`batch.metrics` is one flat dictionary, whose names every logger groups by their first part. Each
logger writes below build/loggers; nothing leaves this machine. A scripted engine stands in for a
model. Needs the logger's package: tensorboard, mlflow-skinny or wandb.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import anyio

import rollout
from rollout.testing import Scenario

DIRECTORY = Path("build/loggers")
STEPS = 3

#: Takes the metrics of a step.
Log = Callable[[dict[str, float], int], object]


def tensorboard() -> tuple[Log, Callable[[], object]]:
    """Event files, for ``tensorboard --logdir build/loggers``."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(DIRECTORY / "tensorboard"))

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(f"rollout/{name}", value, step)

    return log, writer.close


def mlflow() -> tuple[Log, Callable[[], object]]:
    """A store in files; without the next line, wherever ``MLFLOW_TRACKING_URI`` says."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri((DIRECTORY / "mlruns").resolve().as_uri())
    mlflow.set_experiment("rollout")
    mlflow.start_run()
    return lambda metrics, step: mlflow.log_metrics(metrics, step=step), mlflow.end_run


def wandb() -> tuple[Log, Callable[[], object]]:
    """An offline run, for ``wandb sync``."""
    import wandb

    DIRECTORY.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project="rollout", mode="offline", dir=str(DIRECTORY))
    return lambda metrics, step: run.log(metrics, step=step), run.finish


async def main(logger: str) -> None:
    log, close = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}[logger]()
    config = Scenario(seed=1).reply("", "An answer.").config()
    async with rollout.open_rollout(config, reward=lambda trajectory: 1.0) as runtime:
        for step in range(STEPS):
            prompts = [rollout.Prompt(messages=[{"role": "user", "content": f"Question {step}"}])]
            batch = await runtime.generate(prompts, samples=4, step=step)
            log(batch.metrics, step)
    close()
    print(f"{logger}: {STEPS} steps with {len(batch.metrics)} metrics each")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else "tensorboard")
