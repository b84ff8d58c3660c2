"""Generate, learn, update, and again: every token is of the newest weights."""

from collections.abc import Iterator

import anyio
from trainer import Trainer

import rollout

#: Start half as many groups again, and continue the surplus in the next step.
POLICY = rollout.GroupPolicy(oversample=1.5, surplus="carry")


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
    for step in range(version, version + steps):
        batch = await runtime.collect(source, groups, policy=POLICY, step=step)
        mean = await anyio.to_thread.run_sync(trainer.learn, batch)
        version += 1
        await runtime.update_weights(version=version, source=trainer.weights())
        carried = runtime.statistics().carried
        print(f"synchronous: version {version}, reward {mean:.2f}, {carried} carried", flush=True)
    await runtime.discard_carried()
    return version
