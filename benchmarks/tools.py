"""CPU that the tool executor adds to a call, in microseconds.

A tool that does nothing is called through `TrajectoryTools.run`, with everything on that runs in
production: the check of the arguments, the deadline, the policy, the figures, normalisation and
truncation. The same calls without the executor are the limit that nothing can beat, and what is
reported is the difference: a bare await for the async tool, a bare hop to a worker thread and back
for the sync one. In the runs with 1000 trajectories these take turns: between two calls each one
lets the others continue, as it would while its model speaks.

The last line is the result as JSON: `async_us`, `sync_us`, `async_us_1000`, `sync_us_1000`: added
CPU microseconds of a call with 1 and 1000 trajectories; `calls_per_s_1000`: async calls in a second
of wall time; `await_us`, `thread_us`: the limits; where `make bench-verl` has made verl's
environment, `verl_async_us` and `verl_async_us_1000`: what verl's ToolAgentLoop adds to the same
call, without a deadline, a check of arguments or a task of its own.

    python benchmarks/tools.py [--backend trio|asyncio] [--rounds 7] [--quick] [--without-verl]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import time  # noqa: TID251  (what is measured here is CPU time)
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
from peer_verl import environment

from rollout.containment import open_containment
from rollout.limits import Clock, Deadline
from rollout.tools import ToolExecutor, function_tool
from rollout.types import ToolCall
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TRAJECTORIES, CALLS = 1000, 20


@function_tool
async def async_noop(number: int, text: str = "") -> str:
    """Do nothing.

    Args:
        number: Ignored.
        text: Ignored.
    """
    return "done"


@function_tool
def sync_noop(number: int, text: str = "") -> str:
    """Do nothing.

    Args:
        number: Ignored.
        text: Ignored.
    """
    return "done"


class Benchmark:
    """Runs the same calls with and without the executor."""

    def __init__(self, threads: WorkerThreads) -> None:
        self._threads = threads
        self._executor = ToolExecutor(
            [async_noop, sync_noop],
            threads=threads,
            max_parallel_calls=8,
            max_response_length=4096,
            truncate_side="middle",
            tool_s=60.0,
            cleanup_s=5.0,
        )

    async def executed(self, name: str, calls: int) -> None:
        """One trajectory whose calls go through the executor."""
        tools = self._executor.open_session(uid="p", member=0)
        call = ToolCall(name=name, arguments={"number": 1, "text": "x"})
        for _ in range(calls):
            await anyio.lowlevel.checkpoint()
            limit = Clock(Deadline.after(900.0, "limits.turn_s"))
            (result,) = await tools.run([call], limit=limit)
            assert result.text == "done"
        await tools.close()

    async def bare(self, name: str, calls: int) -> None:
        """The same calls without it."""
        for _ in range(calls):
            await anyio.lowlevel.checkpoint()
            if name == "async_noop":
                answer = await async_noop(1, "x")
            else:
                answer = await self._threads.run(name, sync_noop.function, 1, "x")
            assert answer == "done"

    async def cost(
        self, run: Callable[[str, int], Awaitable[None]], name: str, trajectories: int, calls: int
    ) -> tuple[float, float]:
        """CPU microseconds and wall seconds of a call."""
        cpu, wall = time.process_time(), time.perf_counter()
        if trajectories == 1:
            await run(name, calls)
        else:
            async with anyio.create_task_group() as group:
                for _ in range(trajectories):
                    group.start_soon(run, name, calls)
        count = trajectories * calls
        spent = time.process_time() - cpu
        return spent / count * 1e6, (time.perf_counter() - wall) / count


async def measure(rounds: int, share: float) -> dict[str, float]:
    """The figures, each the median over rounds; both ways alternate within a round."""
    threads = WorkerThreads(max_threads=32, max_abandoned=16)
    benchmark = Benchmark(threads)
    single, many = int(5000 * share), max(2, int(CALLS * share))
    figures: dict[str, list[float]] = {}

    def note(key: str, value: float) -> None:
        figures.setdefault(key, []).append(value)

    async with open_containment(5.0):  # as a runtime does
        for round_ in range(rounds + 1):
            for name, key, limit in (
                ("async_noop", "async_us", "await_us"),
                ("sync_noop", "sync_us", "thread_us"),
            ):
                for trajectories, calls, suffix in ((1, single, ""), (TRAJECTORIES, many, "_1000")):
                    bare_us, _ = await benchmark.cost(benchmark.bare, name, trajectories, calls)
                    us, wall_s = await benchmark.cost(benchmark.executed, name, trajectories, calls)
                    if round_ == 0:
                        continue  # warm-up
                    note(f"{key}{suffix}", us - bare_us)
                    note(f"{limit}{suffix}", bare_us)
                    if key == "async_us" and suffix:
                        note("calls_per_s_1000", 1 / wall_s)
    await benchmark._executor.close()
    threads.close()
    return {key: statistics.median(values) for key, values in figures.items()}


def measure_verl(rounds: int) -> dict[str, float]:
    """verl's figures; empty where its environment is missing."""
    if not environment.is_ready():
        return {}
    command = [environment.PYTHON, "-m", "peer_verl.tools", str(rounds)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print a table, and the JSON as the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", choices=("trio", "asyncio"), default="trio")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls, 2 rounds")
    parser.add_argument("--without-verl", action="store_true", help="our side alone")
    options = parser.parse_args(arguments)
    rounds, share = (2, 0.1) if options.quick else (options.rounds, 1.0)
    found = anyio.run(functools.partial(measure, rounds, share), backend=options.backend)
    if not options.without_verl:
        found |= measure_verl(rounds)
    for key, value in sorted(found.items()):
        print(f"{key:>18} {value:12,.1f}")
    result = {"backend": options.backend, **{key: round(v, 1) for key, v in found.items()}}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
