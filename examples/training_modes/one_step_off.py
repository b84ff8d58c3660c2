"""Learn from one batch while the next one is generated: its weights are one step old."""

from collections.abc import Iterator

import anyio
from trainer import Trainer

import rollout


async def train(
    runtime: rollout.RolloutRuntime,
    trainer: Trainer,
    source: Iterator[rollout.Prompt],
    version: int,
    *,
    steps: int,
    groups: int,
) -> int:
    """The version of the weights afterwards."""
    batches: dict[int, rollout.RolloutBatch] = {}

    async def collect(step: int) -> None:
        batches[step] = await runtime.collect(source, groups, step=step)

    first = version
    await collect(first)
    for step in range(first, first + steps):
        async with anyio.create_task_group() as tasks:
            if step + 1 < first + steps:
                tasks.start_soon(collect, step + 1)
            mean = await anyio.to_thread.run_sync(trainer.learn, batches.pop(step))
        version += 1
        await runtime.update_weights(version=version, source=trainer.weights())
        print(f"one step off: version {version}, reward {mean:.2f}", flush=True)
    return version
