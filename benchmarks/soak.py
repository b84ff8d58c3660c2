"""Runs many multi-turn trajectories against engines that fail, and checks every one of them.

    python benchmarks/soak.py [--trajectories 1000000] [--quick]

One runtime lives for the whole run, in virtual time: four simulated engines that die, refuse,
repeat, reorder and garble; tools that fail and hang; callers that cancel and leave. After each
round the recorder of `tests/harness` compares what engines, tools and callers really did with
what the library says. The last line is JSON:

* ``trajectories``: run and checked; ``anomalies``: broken invariants, also told as they come;
* ``rss_start_mb``, ``rss_end_mb``, ``rss_growth``: resident memory after the warm-up and at the
  end, and the growth as a share;
* ``virtual_hours``: on the clock of the engines;
* ``cpu_us_per_turn``: CPU of this process for each assistant's turn, engines and recorder
  included, the checks between rounds not.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time  # noqa: TID251  (benchmarks measure)
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import psutil

from rollout import Prompt, Trajectory, function_tool
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    LimitsConfig,
    RolloutConfig,
    SamplingConfig,
    SchedulingConfig,
    SimulatedEngine,
)
from rollout.engine.cores.simulated.stable import stable_share
from rollout.interactions import ScriptedUser
from rollout.testing import Scenario, run_virtual, tool_call

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from harness.invariants import anomalies_of
from harness.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.watched_runtime import WatchedRuntime

MEMBERS = 4
REPLICAS = 4
#: Share of the run, and most trajectories, before memory is first looked at.
WARM_UP_SHARE, WARM_UP = 0.2, 40_000
#: Virtual seconds that no round may take.
HANGS_S = 5000.0
#: Virtual seconds after which the whole run would be taken for hanging.
CEILING_S = 1e9
REPORTS = 20


@function_tool
async def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    await anyio.sleep(0.05)
    return a + b


@function_tool
async def nap(s: float) -> str:
    """Sleep.

    Args:
        s: Seconds.
    """
    await anyio.sleep(s)
    return "rested"


@function_tool
async def fail() -> str:
    """Fail."""
    raise RuntimeError("out of order")


TOOLS = {"add": ["add"], "chain": ["add"], "nap": ["nap"], "fail": ["fail"], "chat": []}
#: Shares of the kinds of prompts, out of 20.
KINDS = ["add"] * 8 + ["chain"] * 6 + ["chat"] * 4 + ["nap", "fail"]


async def reward(trajectory: Trajectory) -> float:
    return float(len(trajectory.answer))


def config() -> RolloutConfig:
    """Engines that fail in every way that they know, now and then."""
    short = {"median": 10, "sigma": 0.6, "max": 60}
    sum_, more = tool_call("add", a=2, b=3), tool_call("add", a=5, b=5)
    return (
        Scenario(seed=1, stream_interval=64)
        .reply("<add>", sum_ + more, filler=short)
        .then("It is 5.", "Five.")
        .reply("<chain>", sum_)
        .then(more)
        .then("It is 10.", "Ten.")
        .reply("<chat>", "Hello.", filler=short)
        .then("Well then.")
        .reply("<nap>", tool_call("nap", s=30.0))
        .then("That took long.")
        .reply("<fail>", tool_call("fail"))
        .then("A pity.")
        .fault(
            die_after_tokens=60_000,
            reject_share=0.02,
            duplicate_answers=0.02,
            reordered_answers=0.002,
            wrong_length=0.002,
            lost_aborts=3,
        )
        .capacity(max_running=64, max_queued=64)
        .kv(tokens=60_000)
        .config(
            engine=SimulatedEngine(replicas=REPLICAS),
            agent=AgentConfig(max_assistant_turns=4),
            sampling=SamplingConfig(max_new_tokens=200),
            lengths=LengthsConfig(prompt=700, response=700),
            limits=LimitsConfig(tool_s=5.0, generation_s=30.0, trajectory_s=120.0, batch_s=600.0),
            scheduling=SchedulingConfig(samples_per_prompt=MEMBERS, max_failures=None),
        )
    )


def prompts_of(number: int, trajectories: int) -> list[Prompt]:
    """The prompts of round `number`."""
    prompts = []
    for index in range(-(-trajectories // MEMBERS)):
        kind = KINDS[int(stable_share(number, index) * len(KINDS))]
        extra = {"interaction_kwargs": {"name": "critic"}} if kind == "chat" else {}
        messages = [{"role": "user", "content": f"<{kind}> {number}.{index}"}]
        prompts.append(
            Prompt(messages=messages, uid=f"{number}.{index}", tools=TOOLS[kind], extra=extra)
        )
    return prompts


@dataclass
class Soak:
    """One run and what has been seen of it so far.

    Attributes:
        wanted: Trajectories to run.
        each: Trajectories of a round, whose notes are dropped after it has been checked.
        turns: Assistant's turns, those of lost trajectories included.
        cpu_s: CPU seconds of the rounds, without their checks.
    """

    wanted: int
    each: int
    trajectories: int = 0
    turns: int = 0
    cpu_s: float = 0.0
    virtual_s: float = 0.0
    rss_start_mb: float = 0.0
    anomalies: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Open the runtime, run every round and close it again."""
        recorder = Recorder()
        critic = ScriptedUser(["Go on."], name="critic", scores=[0.5])
        async with recorder.open_rollout(config(), [add, nap, fail], reward, [critic]) as runtime:
            number = 0
            while self.trajectories < self.wanted:
                await self._round(runtime, number)
                number += 1
                self._look_at_memory()
                if self.trajectories * REPORTS // self.wanted > self._told:
                    self._tell()
            self.virtual_s = anyio.current_time()
        self.anomalies += recorder.anomalies()

    @property
    def _told(self) -> int:
        return (self.trajectories - self.each) * REPORTS // self.wanted

    async def _round(self, runtime: WatchedRuntime, number: int) -> None:
        prompts = prompts_of(number, min(self.each, self.wanted - self.trajectories))
        before = time.process_time()
        with anyio.move_on_after(HANGS_S) as patience:
            await act_of(number)(runtime, prompts, number)
        self.cpu_s += time.process_time() - before
        if patience.cancelled_caught:
            self.anomalies.append(f"round {number} took more than {HANGS_S:g} s")
        await runtime.settle()
        self._take_stock(runtime, number)
        runtime.forget()

    def _take_stock(self, runtime: WatchedRuntime, number: int) -> None:
        for text in anomalies_of(runtime):
            print(f"round {number}: {text}", flush=True)
            self.anomalies.append(text)
        self.trajectories += sum(call.members for call in runtime.calls)
        self.turns += sum(
            each.has_output for call in runtime.calls for each in call.all_generations()
        )

    def _look_at_memory(self) -> None:
        warm_up = min(WARM_UP_SHARE * self.wanted, WARM_UP)
        if not self.rss_start_mb and self.trajectories >= warm_up:
            gc.collect()
            gc.freeze()
            self.rss_start_mb = rss_mb()

    def _tell(self) -> None:
        us = 1e6 * self.cpu_s / max(1, self.turns)
        print(
            f"{self.trajectories:>9,} trajectories, {len(self.anomalies)} anomalies, "
            f"{rss_mb():.0f} MB, {us:.0f} µs a turn",
            flush=True,
        )

    def report(self) -> dict[str, Any]:
        """What the last line says."""
        gc.collect()
        end_mb = rss_mb()
        return {
            "trajectories": self.trajectories,
            "anomalies": len(self.anomalies),
            "rss_start_mb": round(self.rss_start_mb, 1),
            "rss_end_mb": round(end_mb, 1),
            "rss_growth": round(end_mb / self.rss_start_mb - 1, 4),
            "virtual_hours": round(self.virtual_s / 3600, 2),
            "cpu_us_per_turn": round(1e6 * self.cpu_s / max(1, self.turns), 1),
        }


def act_of(number: int) -> Any:
    """What the caller of round `number` does."""
    return (generate, generate_and_cancel_some, stream, leave, cancelled)[number % 5]


async def generate(runtime: WatchedRuntime, prompts: Sequence[Prompt], step: int) -> None:
    await runtime.generate(prompts, step=step)


async def generate_and_cancel_some(
    runtime: WatchedRuntime, prompts: Sequence[Prompt], step: int
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_some, runtime, prompts)
        await runtime.generate(prompts, step=step)


async def _cancel_some(runtime: WatchedRuntime, prompts: Sequence[Prompt]) -> None:
    for index, prompt in enumerate(prompts[::10]):
        await anyio.sleep(0.1)
        runtime.cancel(prompt.uid, member=index % MEMBERS, reason="surplus")


async def stream(runtime: WatchedRuntime, prompts: Sequence[Prompt], step: int) -> None:
    async with runtime.stream(prompts, step=step) as trajectories:
        async for _ in trajectories:
            await anyio.sleep(0.01)


async def leave(runtime: WatchedRuntime, prompts: Sequence[Prompt], step: int) -> None:
    async with runtime.stream(prompts, step=step) as trajectories:
        for _ in range(len(prompts) * MEMBERS * 3 // 4):
            await trajectories.receive()


async def cancelled(runtime: WatchedRuntime, prompts: Sequence[Prompt], step: int) -> None:
    with anyio.move_on_after(3.0):
        await runtime.generate(prompts, step=step)


def rss_mb() -> float:
    """Resident memory of this process."""
    return float(psutil.Process().memory_info().rss) / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; exit code 1 where an anomaly was found."""
    parser = argparse.ArgumentParser(description="Soak the library in virtual time.")
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--round", type=int, default=400, help="trajectories between two checks")
    parser.add_argument("--seed", type=int, default=0, help="schedule seed")
    parser.add_argument("--quick", action="store_true", help="4,000 trajectories")
    options = parser.parse_args(arguments)
    if options.quick:
        options.trajectories = 4000
    if options.trajectories < 1 or options.round < MEMBERS:
        parser.error(f"expected at least 1 trajectory, and {MEMBERS} in a round")
    logging.getLogger("rollout").setLevel(logging.CRITICAL + 1)  # failures are meant to happen
    soak = Soak(options.trajectories, options.round)
    run_virtual(soak.run, seed=options.seed, ceiling_s=CEILING_S)
    print(json.dumps(soak.report()))
    return 1 if soak.anomalies else 0


if __name__ == "__main__":
    raise SystemExit(main())
