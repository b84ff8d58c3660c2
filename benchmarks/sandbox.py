"""What sandboxes of bubblewrap cost: CPU to open one and to run a command, and memory.

As many are open at once as `--sandboxes` says, opened four at a time, each with some commands. Then
as many trajectories, all at once, call the shell tool and the Python tool, each in its own sandbox.
CPU is that of the driver and of everything in the sandboxes, to the end of each.

The last line is the result as JSON: `open_cpu_ms`: CPU milliseconds to open a sandbox and close it;
`exec_cpu_ms`: of `exec(["true"])`; `mb_each`: MiB of memory of an open sandbox, shared pages shared
out; `leaked`: processes, descriptors and directories that are left, and sandboxes that did not
close in time; `open_ms`, `exec_ms`: wall milliseconds, four at a time; `tools_cpu_ms`: CPU
milliseconds of a trajectory that opens a sandbox and calls both tools; `tools_failed`: trajectories
whose tools did not answer as they should.

    python benchmarks/sandbox.py [--backend trio|asyncio] [--sandboxes 200] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time  # noqa: TID251  (CPU time is what is measured)
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import psutil

import rollout
from rollout import Prompt
from rollout.chat.messages import text_in
from rollout.config import AgentConfig, SandboxConfig, SchedulingConfig, ToolsConfig
from rollout.sandbox import SandboxPool
from rollout.testing import Scenario, tool_call

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from rollout.sandbox import Sandbox

AT_ONCE = 4


def measure_cpu() -> float:
    """CPU seconds of this process and of all that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure_memory() -> float:
    """MiB of the processes below this one, pages that several have divided among them."""
    sizes = [
        process.memory_full_info().pss for process in psutil.Process().children(recursive=True)
    ]
    return sum(sizes) / 2**20


def count_left(before: tuple[int, int]) -> int:
    """Processes, descriptors and directories that were not there before."""
    descriptors, folders = before
    return (
        len(psutil.Process().children(recursive=True))
        + max(0, len(os.listdir("/proc/self/fd")) - descriptors)
        + max(0, count_directories() - folders)
    )


def count_directories() -> int:
    """Directories of sandboxes of this process."""
    return len([*Path(tempfile.gettempdir()).glob(f"rollout-*-{os.getpid()}-*")])


async def do_at_once(jobs: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Run the jobs, a few at a time."""
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def do(job: Callable[[], Awaitable[object]]) -> None:
        async with limiter:
            await job()

    async with anyio.create_task_group() as tasks:
        for job in jobs:
            tasks.start_soon(do, job)


async def measure(count: int, commands: int) -> dict[str, Any]:
    """Open all, measure, run commands in all, close all; then the same without commands."""
    before = len(os.listdir("/proc/self/fd")), count_directories()
    opened = await run_once(count, 0)
    used = await run_once(count, commands)
    leaked = opened["leaked"] + used["leaked"] + count_left(before)
    return {
        "open_cpu_ms": round(1000 * opened["cpu_s"] / count, 1),
        "exec_cpu_ms": round(1000 * (used["cpu_s"] - opened["cpu_s"]) / count / commands, 2),
        "leaked": leaked,
        "mb_each": round(opened["mb"] / count, 2),
        "open_ms": round(1000 * AT_ONCE * opened["open_s"] / count, 1),
        "exec_ms": round(1000 * AT_ONCE * used["exec_s"] / count / commands, 1),
    }


async def run_tools(count: int) -> dict[str, Any]:
    """Trajectories that call both tools, one after the other, all at once."""
    scenario = Scenario(seed=1).reply("go", tool_call("shell", command="echo one >a; cat a"))
    scenario = scenario.then(tool_call("python", code="open('a').read() + 'two'")).then("Done.")
    config = scenario.config(
        agent=AgentConfig(name="tool_agent"),
        tools=ToolsConfig(builtin=["shell", "python"]),
        sandbox=SandboxConfig(provider="bubblewrap", max_open=count),
        scheduling=SchedulingConfig(max_in_flight=count),
    )
    before = len(os.listdir("/proc/self/fd")), count_directories()
    prompts = [Prompt(messages=[{"role": "user", "content": "go"}]) for _ in range(count)]
    async with rollout.open_rollout(config) as runtime:
        cpu = measure_cpu()
        batch = await runtime.generate(prompts)
        cpu = measure_cpu() - cpu
        sandboxes = runtime.statistics().sandboxes
    assert sandboxes is not None
    answers = [
        [text_in(m.content) for m in each.messages if m.role == "tool"]
        for each in batch.trajectories
    ]
    return {
        "tools_cpu_ms": round(1000 * cpu / count, 1),
        "tools_failed": sum(
            len(each) != 2 or "one" not in each[0] or "one\\ntwo" not in each[1] for each in answers
        ),
        "leaked": sandboxes.leaked + count_left(before),
    }


async def run_once(count: int, commands: int) -> dict[str, float]:
    """Open `count` sandboxes, run `commands` in each, close them."""
    pool = SandboxPool(SandboxConfig(provider="bubblewrap", max_open=count), cleanup_s=10)
    sandboxes: list[Sandbox] = []

    async def open_one() -> None:
        sandboxes.append(await pool.acquire())

    async def use(sandbox: Sandbox) -> None:
        for _ in range(commands):
            result = await sandbox.exec(["true"])
            assert result.exit_code == 0

    async with pool.serving(is_needed=True):
        cpu, began = measure_cpu(), time.monotonic()
        await do_at_once([open_one] * count)
        open_s = time.monotonic() - began
        looked = measure_cpu()
        mb = measure_memory()
        cpu += measure_cpu() - looked  # looking is no part of it
        began = time.monotonic()
        await do_at_once([lambda each=each: use(each) for each in sandboxes])
        exec_s = time.monotonic() - began
        async with anyio.create_task_group() as tasks:
            for each in sandboxes:
                tasks.start_soon(pool.release, each)
        cpu = measure_cpu() - cpu
        counts = pool.statistics()
    assert counts is not None
    return {"cpu_s": cpu, "open_s": open_s, "exec_s": exec_s, "mb": mb, "leaked": counts.leaked}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", choices=("trio", "asyncio"), default="trio")
    parser.add_argument("--sandboxes", type=int, default=200)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    count, commands = (40, 5) if options.quick else (options.sandboxes, 10)
    figures = anyio.run(measure, count, commands, backend=options.backend)
    tools = anyio.run(run_tools, count, backend=options.backend)
    print(json.dumps({**figures, **tools, "leaked": figures["leaked"] + tools["leaked"]}))


if __name__ == "__main__":
    main()
