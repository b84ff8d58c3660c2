"""Groups come as they finish, and weights change while others are generated."""

from collections.abc import Iterator

import anyio
from trainer import Trainer

import rollout

#: How many versions old the first token of a group may be when it is taken.
MAX_STALENESS = 2


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
    last, taken = version + steps, []
    async with runtime.stream_groups(
        source, max_staleness=MAX_STALENESS, groups_per_step=groups
    ) as stream:
        async for group in stream:
            taken.append(group)
            if len(taken) < groups:
                continue
            oldest = version - min(each.min_version for each in taken)
            batch = await runtime.make_batch(taken)
            mean = await anyio.to_thread.run_sync(trainer.learn, batch)
            version += 1
            await runtime.update_weights(version=version, source=trainer.weights())
            taken = []
            print(
                f"fully asynchronous: version {version}, reward {mean:.2f}, "
                f"tokens up to {oldest} versions old",
                flush=True,
            )
            if version == last:
                break
    return version
