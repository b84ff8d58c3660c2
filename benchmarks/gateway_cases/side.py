"""Rounds of the same agent, natively or through the gateway, in a process of their own.

    python -m gateway_cases.side '{"backend": "asyncio", "directory": …, "n": 1000, "way": "http"}'

A line on standard input, ``{}`` or ``{"probe": true}``, is a round; its figures come back as a line
of JSON: those of `driver_cases.ours`, and with `probe` the latencies of single generations.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time  # noqa: TID251  (what is measured)
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import attrs
from driver_cases.measuring import Clocks
from driver_cases.ours import HELD_S, Plan, Tools, config_of, contents, prompts_of
from driver_cases.side_process import answers_on_stdout

import rollout
from gateway_cases.client import PROBES
from rollout.config import AgentConfig, GatewayConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HERE = Path(__file__).parents[1]


class Clients:
    """The process in which clients run; agents hand their addresses to it."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process
        self._lines, self._to_send = anyio.create_memory_object_stream[bytes](math.inf)
        self._ended: list[anyio.Event] = []
        self.latencies: list[float] = []

    def tell(self, **line: Any) -> None:
        """One line of the input."""
        self._lines.send_nowait(json.dumps(line).encode() + b"\n")

    async def write(self) -> None:
        """Send the lines."""
        assert self._process.stdin is not None
        async with self._process.stdin, self._to_send:
            async for line in self._to_send:
                lines = [line]  # all that there are: writing them is not what is measured
                with suppress(anyio.WouldBlock):
                    while True:
                        lines.append(self._to_send.receive_nowait())
                await self._process.stdin.send(b"".join(lines))

    async def run(self, address: Any, question: str) -> None:
        """Until the client of this trajectory has ended."""
        ended = anyio.Event()
        self._ended.append(ended)
        self.tell(
            base_url=address.base_url,
            api_key=address.api_key,
            model=address.model,
            question=question,
        )
        await ended.wait()

    async def watch(self) -> None:
        """Tell agents that their clients have ended."""
        assert self._process.stdout is not None
        rest = b""
        async for data in self._process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"["):
                    self.latencies = json.loads(line)
                else:
                    self._ended[int(line)].set()
        for ended in self._ended:  # one that has failed has said why
            ended.set()

    async def end(self) -> None:
        """Wait until it has said all."""
        self._lines.close()
        await self._process.wait()


CLIENTS: list[Clients] = []
LATENCIES: list[float] = []


class Probe:
    """Has agents begin together, and then act one at a time."""

    def __init__(self, awaited: int) -> None:
        self.one_at_a_time = anyio.Semaphore(1)
        self._awaited = awaited
        self._all = anyio.Event()

    async def all_begun(self) -> None:
        """Wait until as many do."""
        self._awaited -= 1
        if not self._awaited:
            self._all.set()
        await self._all.wait()


PROBE: list[Probe] = []


@rollout.register_agent("by_http")
class ByHttp(rollout.AgentLoop):
    """Its client is in another process."""

    needs_gateway = True

    async def run(self, context: rollout.AgentContext) -> None:
        """Wait for the client."""
        question = context.prompt.messages[0]
        said = question["content"] if isinstance(question, dict) else question.content
        async with context.gateway.open(context) as address:
            await CLIENTS[-1].run(address, str(said))


@rollout.register_agent("timed_natively")
class TimedNatively(rollout.AgentLoop):
    """The same agent within, one turn of all at once, each generation timed."""

    async def run(self, context: rollout.AgentContext) -> None:
        """As the tool agent, once all have begun."""
        probe = PROBE[-1]
        await probe.all_begun()
        while True:
            async with probe.one_at_a_time if len(LATENCIES) < PROBES else nullcontext():
                began = time.perf_counter()
                turn = await context.generate()
                LATENCIES.append(time.perf_counter() - began)
                if turn.calls:
                    await context.call_tools(turn.calls)
            if not turn.calls:
                return


AGENTS = {"native": "tool_agent", "http": "by_http"}


@asynccontextmanager
async def clients() -> AsyncIterator[Clients]:
    """A process of clients, started and ended."""
    command = [sys.executable, "-m", "gateway_cases.client"]
    async with (
        await anyio.open_process(command, cwd=HERE, stderr=None) as process,
        anyio.create_task_group() as tasks,
    ):
        started = Clients(process)
        CLIENTS.append(started)
        tasks.start_soon(started.watch)
        tasks.start_soon(started.write)
        yield started
        await started.end()


async def round_of(runtime: Any, plan: Plan, way: str, probe: bool) -> dict[str, Any]:
    """One round: what a generation cost, and what came out."""
    name = "timed_natively" if probe and way == "native" else AGENTS[way]
    prompts = [
        rollout.Prompt(messages=each.messages, agent_name=name) for each in prompts_of(plan.n)
    ]
    gc.collect()
    LATENCIES.clear()
    PROBE.append(Probe(plan.n))
    async with clients() as outside:
        if probe:
            outside.tell(probe=plan.n)
        clocks = Clocks()
        async with runtime.stream(prompts) as ended:
            trajectories = [each async for each in ended]
        figures: dict[str, Any] = clocks.per(plan.generations)
    latencies = sorted((outside.latencies or LATENCIES)[:PROBES])
    if latencies:
        at = [latencies[int(share * (len(latencies) - 1))] * 1e3 for share in (0.5, 0.99)]
        figures |= {"p50_ms": at[0], "p99_ms": at[1]}
    return figures | contents(trajectories)


async def serve(plan: Plan, way: str) -> None:
    """A round for each line."""
    config = attrs.evolve(
        config_of(plan),
        agent=AgentConfig(name=AGENTS[way]),
        # Connections wait for their turn without a word.
        gateway=GatewayConfig(max_connections=plan.n * 2, head_s=HELD_S),
    )
    with answers_on_stdout() as answer:
        async with rollout.open_rollout(config, Tools(plan.n).functions()) as runtime:
            answer({})
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                asked = json.loads(line)
                answer(await round_of(runtime, plan, way, asked.get("probe", False)))


def main() -> None:
    """Serve as the options say."""
    options = json.loads(sys.argv[1])
    backend, way = options.pop("backend"), options.pop("way")
    loop = {"use_uvloop": True} if backend == "asyncio" else {}
    anyio.run(serve, Plan(**options), way, backend=backend, backend_options=loop)


if __name__ == "__main__":
    main()
