"""Three ways to let a trainer and its engines take turns, one after the other on one runtime.

python examples/training_modes/run.py [MODE ...] [--steps 2] [--groups 2] [--members 2]

MODE is synchronous, one_step_off or fully_asynchronous; without any, all of them run.
"""

from __future__ import annotations

import argparse

import anyio
import fully_asynchronous
import one_step_off
import synchronous
from trainer import Trainer, config_for, endless_prompts, reward

import rollout

MODES = {
    "synchronous": synchronous.train,
    "one_step_off": one_step_off.train,
    "fully_asynchronous": fully_asynchronous.train,
}


async def main(modes: list[str], steps: int, groups: int, members: int, tokens: int) -> None:
    source, version = endless_prompts(), 0
    config = config_for(members, tokens)
    async with rollout.open_rollout(config, reward=reward) as runtime:
        trainer = await anyio.to_thread.run_sync(Trainer)
        for mode in modes:
            version = await MODES[mode](
                runtime, trainer, source, version, steps=steps, groups=groups
            )
    print(f"modes: {len(modes)}, versions: {version}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modes", nargs="*", choices=[*MODES, []], metavar="MODE")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    asked = parser.parse_args()
    anyio.run(
        main, asked.modes or list(MODES), asked.steps, asked.groups, asked.members, asked.tokens
    )
