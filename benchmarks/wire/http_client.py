"""Many requests in flight over HTTP, with connections kept alive and orjson on both sides."""

from __future__ import annotations

import asyncio  # noqa: TID251  (aiohttp is made of it)

import aiohttp
import orjson
import uvloop

from wire.payload import ANSWER, Result, cpu_s, prompt_ids, wall_s

SAMPLING = {"max_new_tokens": ANSWER, "temperature": 1.0, "top_p": 1.0}


def measure(
    url: str, pids: tuple[int, ...], tokens: int, in_flight: int, count: int, rounds: int
) -> list[Result]:
    """Rate and cost of each round."""
    return uvloop.run(_measure(url, pids, tokens, in_flight, count, rounds))


async def _measure(
    url: str, pids: tuple[int, ...], tokens: int, in_flight: int, count: int, rounds: int
) -> list[Result]:
    prompt = prompt_ids(tokens).tolist()
    results = []
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=600)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def ask(number: int) -> None:
            body = orjson.dumps({"rid": f"{number:032x}", "input_ids": prompt, **SETTINGS})
            headers = {"Content-Type": "application/json"}
            async with http.post(url, data=body, headers=headers) as response:
                answer = orjson.loads(await response.read())
            assert len(answer["output_ids"]) == len(answer["output_log_probs"]) == ANSWER

        async def work(numbers: list[int]) -> None:
            for number in numbers:
                await ask(number)

        for _ in range(1 + rounds):  # the first one opens the connections
            cpu, wall = cpu_s(*pids), wall_s()
            parts = [list(range(first, count, in_flight)) for first in range(in_flight)]
            await asyncio.gather(*map(work, parts))
            cpu, wall = cpu_s(*pids) - cpu, wall_s() - wall
            results.append(Result(count / wall, cpu / count * 1e6))
    return results[1:]


SETTINGS = {"sampling_params": SAMPLING, "return_logprob": True}
