"""Many calls of a Ray actor in flight; a program of its own, because Ray fills its process.

    python -m wire.ray_client '[[2048, 1, 500, 3], …]'

Prints one JSON line for each case: a list of [requests per second, CPU µs per request].
"""

from __future__ import annotations

import asyncio  # noqa: TID251  (Ray's awaitables are made for it)
import json
import os
import sys
from typing import Any

import ray
import uvloop

from wire.payload import ANSWER, ANSWER_IDS, ANSWER_LOG_PROBS, cpu_s, prompt_ids, wall_s


class Instant:
    """The same 200 tokens for everybody, packed: as cheap as Ray can carry them."""

    def __init__(self) -> None:
        self._answer = ANSWER_IDS.tobytes(), ANSWER_LOG_PROBS.tobytes()

    def pid(self) -> int:
        """Of the actor's process."""
        return os.getpid()

    def generate(self, request_id: str, prompt: bytes, sampling: dict[str, Any]) -> Any:
        """Answer at once."""
        return request_id, *self._answer, "length"


SAMPLING = {"max_new_tokens": ANSWER, "temperature": 1.0, "top_p": 1.0}


async def measure(actor: Any, pid: int, tokens: int, in_flight: int, count: int) -> list[float]:
    """Rate and cost of one round."""
    prompt = prompt_ids(tokens).tobytes()

    async def work(numbers: range) -> None:
        for number in numbers:
            answer = await actor.generate.remote(f"{number:032x}", prompt, SAMPLING)
            assert len(answer[1]) == 4 * ANSWER

    cpu, wall = cpu_s(pid), wall_s()
    await asyncio.gather(*(work(range(first, count, in_flight)) for first in range(in_flight)))
    cpu, wall = cpu_s(pid) - cpu, wall_s() - wall
    return [count / wall, cpu / count * 1e6]


def main() -> None:
    """Run the cases of the first argument."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    actor = ray.remote(Instant).remote()
    pid = ray.get(actor.pid.remote())
    for tokens, in_flight, count, rounds in json.loads(sys.argv[1]):
        results = [
            uvloop.run(measure(actor, pid, tokens, in_flight, count)) for _ in range(1 + rounds)
        ]
        print(json.dumps(results[1:]), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
