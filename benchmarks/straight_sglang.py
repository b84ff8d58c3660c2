"""The other side of `sglang_overhead.py`: `sglang.Engine` by itself, in SGLang's environment.

Reads lines of JSON: first the engine's options, then one plan after another. A plan is a list of
trajectories, each a list of turns ``[prompt ids, tokens to generate, seconds until the next]``.
Answers each line with one of JSON; a plan with the seconds that it took.
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (SGLang is written for it)
import inspect
import json
import os
import sys
import time  # noqa: TID251  (what is measured here)
from typing import Any

from rollout.engine.cores.sglang.plugin import CPU_VARIABLE
from rollout.engine.cores.sglang.server_arguments import SGLangOptions, engine_arguments


async def one_trajectory(engine: Any, turns: list[tuple[list[int], int, float]]) -> int:
    """Its turns in their order, as a program without this library would ask for them."""
    tokens = 0
    for prompt, count, pause_s in turns:
        answer = await engine.async_generate(
            input_ids=prompt,
            sampling_params={"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True},
            return_logprob=True,
        )
        tokens += len(answer["output_ids"])
        await asyncio.sleep(pause_s)
    return tokens


async def run_plan(engine: Any, plan: list[list[Any]]) -> dict[str, float]:
    """All trajectories at once."""
    begun = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one_trajectory(engine, turns) for turns in plan)))
    return {"seconds": time.perf_counter() - begun, "tokens": tokens}


def main() -> None:
    """Serve plans until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever SGLang prints
    options = SGLangOptions(**json.loads(sys.stdin.readline()))
    if options.is_cpu:
        os.environ[CPU_VARIABLE] = "1"
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import sglang
    from sglang.srt.server_args import ServerArgs

    known = inspect.signature(ServerArgs).parameters
    engine = sglang.Engine(**engine_arguments(options, options.model, known))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        done = engine.loop.run_until_complete(run_plan(engine, json.loads(line)))
        print(json.dumps(done), file=answers)
    engine.shutdown()


if __name__ == "__main__":
    main()
