"""What thousands of replicas cost the driver's loop: while idle, at the start, and in an update.

Simulated cores live in a few processes, each behind a port of its own, so that the driver has as
many connections as with real engines, and the CPU time of its process is its own. The engines
start (`start_s`), stand idle (`loop_share_idle`: the CPU share of heartbeats and load reports),
get all trajectories, change their weights while those are in flight (`weight_update_loop_s`: CPU
seconds of the driver's process until `update_weights` returns), and answer them (`lost`:
trajectories that did not complete, or without all of their tokens).

The last line is the result as JSON.

    python benchmarks/replicas.py [--replicas 2048] [--trajectories 20000] [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time  # noqa: TID251  (what is measured here is CPU time)
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rollout import DiskWeights, Prompt
from rollout.config import LengthsConfig, LimitsConfig, SchedulingConfig, SimulatedEngine
from rollout.engine.channel.server import EngineServer
from rollout.engine.channel.sockets import connect_engine
from rollout.engine.cores.simulated.simulated_core import SimulatedCore
from rollout.engine.placement.placement import CoreSpec, ReplicaHandle
from rollout.engine.pool.opening import open_engines
from rollout.runtime.opening import open_rollout_on
from rollout.scheduling.rewards.functions import GivenRewards
from rollout.testing import Scenario

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HOST = "127.0.0.1"
SECRET = b"of a benchmark on this machine  "
#: Processes that the engines live in.
PROCESSES = 4
SAMPLES = 16
TOKENS = 64
#: Seconds of a decoding step: the answers are long enough under way for an update of the weights.
STEP_S = 1.0
IDLE_S = 20.0


async def serve_cores(count: int, options: dict[str, Any]) -> None:
    """Serve so many cores, print their ports, and end with standard input."""
    async with anyio.create_task_group() as tasks:
        ports = []
        for _ in range(count):
            core = SimulatedCore(**options)
            await core.start()
            listener = await anyio.create_tcp_listener(local_host=HOST)
            ports.append(listener.extra(anyio.abc.SocketAttribute.local_port))
            tasks.start_soon(EngineServer(core, SECRET).serve, listener.listeners)
        print(json.dumps(ports), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        tasks.cancel_scope.cancel()


class FewProcesses:
    """A placement: the replicas of all slots, in processes that run already."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports

    @asynccontextmanager
    async def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AsyncIterator[ReplicaHandle]:
        """See `Placement.open_replica`."""
        connect = partial(connect_engine, HOST, self._ports[spec.slot], None)
        yield ReplicaHandle(connect, SECRET, anyio.Event())

    async def release(self, name: str) -> None:
        """Nothing is kept."""


def start_processes(replicas: int, options: dict[str, Any], stack: ExitStack) -> list[int]:
    """Start the processes of the engines; returns all their ports."""
    each = math.ceil(replicas / PROCESSES)
    processes = []
    for first in range(0, replicas, each):
        count = min(each, replicas - first)
        command = [sys.executable, __file__, "--serve", str(count), json.dumps(options)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        stack.callback(process.wait)
        stack.callback(process.stdin.close)  # type: ignore[union-attr]
        processes.append(process)
    lines = [process.stdout.readline() for process in processes]  # type: ignore[union-attr]
    return [port for line in lines for port in json.loads(line)]


async def measure(replicas: int, trajectories: int) -> dict[str, Any]:
    """Run it all; the figures."""
    scenario = Scenario(seed=1).reply("", filler=TOKENS)
    groups = math.ceil(trajectories / SAMPLES)
    config = scenario.config(
        engine=SimulatedEngine(replicas=replicas, stream_interval=16),
        lengths=LengthsConfig(prompt=64, response=2 * TOKENS),
        limits=LimitsConfig(batch_s=3600.0),
        scheduling=SchedulingConfig(samples_per_prompt=SAMPLES, max_in_flight=groups * SAMPLES),
    )
    options = {**scenario.to_dict(), "timing": {"base_s": STEP_S, "slope_s": 0.0}}
    result: dict[str, Any] = {"replicas": replicas, "trajectories": groups * SAMPLES}
    with ExitStack() as stack:
        ports = start_processes(replicas, options, stack)
        opener = partial(open_engines, placement=FewProcesses(ports))
        began = anyio.current_time()
        opening = open_rollout_on(opener, config, (), GivenRewards(None, None), ())
        async with opening as runtime:
            result["start_s"] = anyio.current_time() - began
            await anyio.sleep(2.0)
            cpu, began = time.process_time(), anyio.current_time()
            await anyio.sleep(IDLE_S)
            share = (time.process_time() - cpu) / (anyio.current_time() - began)
            result["loop_share_idle"] = share
            await run_batch(runtime, groups, result)
            result["restarts"] = sum(r.starts for r in runtime.statistics().replicas) - replicas
    return result


def count_in_flight(runtime: Any) -> int:
    """Requests in flight on all replicas."""
    return sum(replica.in_flight for replica in runtime.statistics().replicas)


async def run_batch(runtime: Any, groups: int, result: dict[str, Any]) -> None:
    """Run all trajectories, and change the weights while they are in flight."""
    prompts = [Prompt(messages=[{"role": "user", "content": "go"}]) for _ in range(groups)]

    async def update() -> None:
        # Where sending takes longer than an answer, the first ones end before the last are sent.
        def is_underway() -> bool:
            statistics = runtime.statistics()
            in_flight = sum(replica.in_flight for replica in statistics.replicas)
            return in_flight == groups * SAMPLES or statistics.finished > 0

        while not is_underway():  # noqa: ASYNC110
            await anyio.sleep(0.5)
        result["in_flight_at_update"] = count_in_flight(runtime)
        cpu, began = time.process_time(), anyio.current_time()
        await runtime.update_weights(version=1, source=DiskWeights("."))
        result["weight_update_loop_s"] = time.process_time() - cpu
        result["weight_update_s"] = anyio.current_time() - began

    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(update)
        batch = await runtime.generate(prompts, step=1)
    result["batch_s"] = anyio.current_time() - began
    whole = sum(
        trajectory.outcome == "completed" and trajectory.transcript.generated_length > TOKENS // 2
        for trajectory in batch.trajectories
    )
    result["lost"] = groups * SAMPLES - whole


def main() -> None:
    """Measure, and print the result as the last line."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2048)
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help="64 replicas, 640 trajectories")
    parser.add_argument("--serve", nargs=2, metavar=("COUNT", "OPTIONS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        count, core = options.serve
        anyio.run(serve_cores, int(count), json.loads(core), backend="trio")
        return
    sizes = (64, 640) if options.quick else (options.replicas, options.trajectories)
    result = anyio.run(measure, *sizes, backend="trio")
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in result.items()
    }
    print(json.dumps({**rounded, "cpus": os.cpu_count()}))


if __name__ == "__main__":
    main()
