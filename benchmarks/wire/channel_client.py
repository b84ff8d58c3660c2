"""Many requests in flight over our channel, and one trajectory of 64 turns."""

from __future__ import annotations

import statistics
from array import array
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio

from rollout.engine.channel.channel import connect_channel
from rollout.engine.channel.messages import Submit
from rollout.engine.core import SamplingParams
from rollout.engine.pool.generation import Generation
from rollout.seeds import RequestIds
from rollout.token_prefix import TokenPrefix
from wire.payload import ANSWER, Result, cpu_s, prompt_ids, wall_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.channel.channel import Channel
    from rollout.engine.core import Chunk

SAMPLING = SamplingParams(max_new_tokens=ANSWER)
GENERATION_S = 600.0
TURNS = 64
#: Tokens that a tool's answer adds between two generations.
OBSERVATION = 100
#: Trajectories whose turns are taken side by side, so that one is not all noise.
TRAJECTORIES = 64


class Request:
    """The record of one request, as small as a channel allows."""

    media = ()

    def __init__(self) -> None:
        self.generation = Generation()
        self.done = anyio.Event()

    def take(self, chunk: Chunk) -> bool:
        """Take its tokens."""
        self.generation.append(chunk)
        return True

    def end(self, lost_reason: str) -> None:
        """Wake the caller."""
        self.done.set()


class Requester:
    """Makes requests over one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ids = RequestIds()

    async def generate(self, prompt: bytes, session_id: str = "") -> Generation:
        """One generation, as a pool makes it."""
        request = Request()
        await self._channel.wait_for_room()
        self._channel.submit_nowait(
            Submit(self._ids.new(), prompt, SAMPLING, session_id, remaining_s=GENERATION_S),
            request,
        )
        await request.done.wait()
        assert len(request.generation.ids) == ANSWER
        return request.generation


@asynccontextmanager
async def open_requester(port: int, secret: bytes) -> AsyncIterator[Requester]:
    """A channel to the server of this port."""
    connect = partial(anyio.connect_tcp, "127.0.0.1", port)
    async with connect_channel("engine", connect, secret) as channel:
        yield Requester(channel)


def measure(
    port: int, secret: bytes, pid: int, tokens: int, in_flight: int, count: int, rounds: int
) -> list[Result]:
    """Rate and cost of each round."""
    return anyio.run(_measure, port, secret, pid, tokens, in_flight, count, rounds, backend="trio")


async def _measure(
    port: int, secret: bytes, pid: int, tokens: int, in_flight: int, count: int, rounds: int
) -> list[Result]:
    prompt, results = prompt_ids(tokens).tobytes(), []
    async with open_requester(port, secret) as requester:

        async def work(times: int) -> None:
            for _ in range(times):
                await requester.generate(prompt)

        for _ in range(1 + rounds):
            cpu, wall = cpu_s(pid), wall_s()
            async with anyio.create_task_group() as tasks:
                for first in range(in_flight):
                    tasks.start_soon(work, len(range(first, count, in_flight)))
            cpu, wall = cpu_s(pid) - cpu, wall_s() - wall
            results.append(Result(count / wall, cpu / count * 1e6))
    return results[1:]


def linear(port: int, secret: bytes, pid: int, rounds: int) -> tuple[float, float, float]:
    """CPU µs of turn 2 and of turn 64, client and server, and the first over the second.

    The turns add as many tokens each; every figure is the median over rounds, and the ratio the
    median of the rounds' ratios.
    """
    costs = [anyio.run(_turns, port, secret, pid, backend="trio") for _ in range(rounds)]
    early = statistics.median(cost[0] for cost in costs)
    late = statistics.median(cost[1] for cost in costs)
    return early, late, statistics.median(cost[1] / cost[0] for cost in costs)


async def _turns(port: int, secret: bytes, pid: int) -> tuple[float, float]:
    costs: list[float] = []
    prompt, observation = prompt_ids(2048), array("i", range(OBSERVATION))
    prefixes = [TokenPrefix() for _ in range(TRAJECTORIES)]
    for prefix in prefixes:
        prefix.extend(prompt)
    async with open_requester(port, secret) as requester:

        async def turn(number: int, prefix: TokenPrefix) -> None:
            generation = await requester.generate(prefix.packed(), f"{number}")
            prefix.extend(generation.ids)
            prefix.extend(observation)

        for _ in range(TURNS):
            cpu = cpu_s(pid)
            async with anyio.create_task_group() as tasks:
                for number, prefix in enumerate(prefixes):
                    tasks.start_soon(turn, number, prefix)
            costs.append((cpu_s(pid) - cpu) / TRAJECTORIES * 1e6)
    return costs[1], costs[-1]
