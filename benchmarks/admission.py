"""Makespan with adaptive admission over makespan without it, on engines that are short of memory.

The whole library in virtual time: batches of 512 trajectories, at most 128 in flight, on one
simulated engine with the speed of an 8B model on one GPU (a step of 12 ms and 60 µs for each
request, 15,000 prompt tokens prefilled in a second, during which nothing is decoded). An engine
whose memory is full puts requests back, which are prefilled again, and forgets the prefixes of
trajectories that wait for a tool, least recently used first. Answers are log-normal with a long
tail; most tools take a second or two, some a minute.

* `agents`: up to 24 turns with a tool, half of the trajectories end within 7.
* `mixed`: half of the groups have tools, the others are one long answer.
* `single`: one long answer each.

Each workload runs with two sizes of memory in which not all prefixes fit (`kv`), and with room for
all of them (`plain`). A seed gives both runs of a pair the same trajectories. `makespan_ratio_kv`
and `makespan_ratio_plain` are geometric means over workloads, sizes and seeds. Intervals are 95 %
over the seeds. The controller's constants were chosen on other seeds, lengths and sizes.

    python benchmarks/admission.py [--seeds 8] [--quick]

The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, Any

import anyio
import attrs
from intervals import ratio_and_half

import rollout
from rollout import Prompt
from rollout.config import (
    AgentConfig,
    ChannelConfig,
    LengthsConfig,
    LimitsConfig,
    SamplingConfig,
    SchedulingConfig,
    ToolsConfig,
)
from rollout.engine.cores.simulated.stable import filler_text, stable_key, stable_lognormal
from rollout.testing import Scenario, run_virtual, tool_call
from rollout.tools import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from rollout.types import ToolCall

MOST, GROUPS, MEMBERS = 128, 64, 8
TIMING = {"base_s": 0.012, "slope_s": 6e-5, "prefill_tokens_per_s": 15_000.0}
BLOCK_TOKENS = 64
PLAIN = 4_000_000


@attrs.frozen
class Workload:
    """How trajectories are drawn.

    Attributes:
        prompt: Tokens of a group's prompt.
        turns: Most turns of a trajectory.
        stop: Chance that a turn is the last.
        alone: Share of the groups whose trajectories are one answer.
        answer: Median, sigma and longest of the log-normal answers, in tokens.
        long_answer: The same, of trajectories that are one answer.
        observed: Tokens of a tool's answer.
        tool: Median and sigma of the log-normal seconds of a tool.
        memory: Sizes of the KV cache.
    """

    prompt: int
    turns: int
    stop: float
    alone: float
    answer: tuple[float, float, int]
    long_answer: tuple[float, float, int]
    observed: int
    tool: tuple[float, float]
    memory: tuple[int, int]


WORKLOADS = {
    "agents": Workload(
        prompt=1500,
        turns=24,
        stop=0.1,
        alone=0.0,
        answer=(200.0, 0.9, 4000),
        long_answer=(200.0, 0.9, 4000),
        observed=600,
        tool=(1.5, 1.2),
        memory=(200_000, 320_000),
    ),
    "mixed": Workload(
        prompt=1000,
        turns=16,
        stop=0.15,
        alone=0.5,
        answer=(250.0, 0.8, 4000),
        long_answer=(1500.0, 0.8, 12_000),
        observed=500,
        tool=(1.5, 1.2),
        memory=(150_000, 240_000),
    ),
    "single": Workload(
        prompt=1000,
        turns=1,
        stop=0.0,
        alone=1.0,
        answer=(1500.0, 0.8, 12_000),
        long_answer=(1500.0, 0.8, 12_000),
        observed=0,
        tool=(1.0, 0.0),
        memory=(100_000, 160_000),
    ),
}


class Lookup(Tool):
    """A tool that takes its time and answers at length; the trajectory and call say how long."""

    name = "lookup"
    schema = {  # noqa: RUF012
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {}},
        },
    }

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._seed = seed

    async def open(self, context: ToolContext) -> ToolSession:
        """A session of one trajectory."""
        return _LookupSession(self._workload, (self._seed, context.uid, context.member))


class _LookupSession(ToolSession):
    def __init__(self, workload: Workload, name: tuple[int | str, ...]) -> None:
        self._workload = workload
        self._name = name
        self._calls = 0

    async def execute(self, call: ToolCall) -> str:
        self._calls += 1
        median, sigma = self._workload.tool
        await anyio.sleep(stable_lognormal(median, sigma, *self._name, self._calls))
        key = stable_key(*self._name, self._calls)
        return filler_text(key, 0, self._workload.observed).decode()


def config_of(workload: Workload, seed: int, kv: int, *, is_adaptive: bool) -> Any:
    """The batch's configuration."""
    call, stop = tool_call("lookup"), round(100 * workload.stop)
    lengths = [dict(zip(("median", "sigma", "max"), x, strict=True)) for x in _answers(workload)]
    scenario = (
        Scenario(seed=seed, stream_interval=1 << 20)
        .reply("<agent>", *[call] * (100 - stop), *["Done."] * stop, filler=lengths[0])
        .reply("<alone>", "Done.", filler=lengths[1])
        .timing(**TIMING)
        .kv(tokens=kv, block_tokens=BLOCK_TOKENS)
        .capacity(context_length=131_072)
    )
    return scenario.config(
        channel=ChannelConfig(stream_interval_s=60.0),  # tokens come at the end: half the time
        sampling=SamplingConfig(),
        agent=AgentConfig(max_assistant_turns=workload.turns),
        lengths=LengthsConfig(prompt=8192, response=65_536),
        limits=LimitsConfig(generation_s=None, turn_s=None, trajectory_s=None, batch_s=1e6),
        tools=ToolsConfig(max_response_length=10_000),
        scheduling=SchedulingConfig(
            samples_per_prompt=MEMBERS, max_in_flight=MOST, adaptive_admission=is_adaptive
        ),
    )


def _answers(workload: Workload) -> tuple[tuple[float, float, int], ...]:
    return workload.answer, workload.long_answer


def prompts_of(workload: Workload, seed: int) -> list[Prompt]:
    """The groups' prompts, each of its own words."""
    prompts = []
    for group in range(GROUPS):
        is_alone = (group + 1) * workload.alone // 1 > group * workload.alone // 1
        words = filler_text(stable_key("prompt", seed, group), 0, workload.prompt).decode()
        text = f"{'<alone>' if is_alone else '<agent>'} {words}"
        prompts.append(Prompt(messages=[{"role": "user", "content": text}], uid=f"{group}"))
    return prompts


@attrs.frozen
class Run:
    """One batch.

    Attributes:
        makespan_s: From the call to its end, in virtual time.
        fewest: The smallest number of trajectories that was allowed.
        reuse: Share of the prefixes that engines still had when the next turn came.
        preemptions: Requests put back for want of memory.
    """

    makespan_s: float
    fewest: int
    reuse: float
    preemptions: int


async def _generate(name: str, seed: int, kv: int, is_adaptive: bool) -> Run:
    workload = WORKLOADS[name]
    config = config_of(workload, seed, kv, is_adaptive=is_adaptive)
    tools = [Lookup(workload, seed)] if workload.alone < 1 else []
    fewest = MOST
    async with rollout.open_rollout(config, tools) as runtime, anyio.create_task_group() as tasks:

        async def watch() -> None:
            nonlocal fewest
            while True:
                await anyio.sleep(1.0)
                fewest = min(fewest, runtime.statistics().max_running)

        tasks.start_soon(watch)
        began = anyio.current_time()
        async with runtime.stream(prompts_of(workload, seed), step=0) as trajectories:
            outcomes = {trajectory.outcome.value async for trajectory in trajectories}
        took = anyio.current_time() - began
        tasks.cancel_scope.cancel()
        (load,) = runtime.engines.loads().values()
        tally = runtime.services.tally
    if not outcomes <= {"completed", "limit"}:
        raise SystemExit(f"{name}: outcomes {outcomes}; expected every trajectory to end")
    reuse = tally.reused_tokens / max(1, tally.known_tokens)
    return Run(took, fewest, reuse, load.preemptions)


def run_pair(job: tuple[str, int, int]) -> tuple[Run, Run]:
    """The same trajectories with adaptive admission and without."""
    name, kv, seed = job
    with_, without = (
        run_virtual(_generate, name, seed, kv, is_adaptive, seed=seed, ceiling_s=1e7)
        for is_adaptive in (True, False)
    )
    return with_, without


def compare(seeds: int, sizes: dict[str, tuple[int, ...]]) -> dict[str, dict[str, float]]:
    """All workloads and sizes of memory, on all cores; each line is shown when it is complete."""
    cases = [(name, kv) for name, kvs in sizes.items() for kv in kvs]
    jobs = [(name, kv, 1000 + seed) for (name, kv), seed in product(cases, range(seeds))]
    rows = {}
    print(f"{'':16}ratio            makespan, s      reuse         fewest   preempted", flush=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        runs = iter(pool.map(run_pair, jobs))
        for name, kv in cases:
            pairs = [next(runs) for _ in range(seeds)]
            title = f"{name}_{'plain' if kv == PLAIN else f'{kv // 1000}k'}"
            rows[title] = _row(pairs)
            _show(title, rows[title])
    return rows


def _row(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    ratios = [with_.makespan_s / without.makespan_s for with_, without in pairs]
    ratio, interval = ratio_and_half(ratios)
    means = [
        [statistics.fmean(getattr(pair[side], field.name) for pair in pairs) for side in (0, 1)]
        for field in attrs.fields(Run)
    ]
    return {
        "ratio": round(ratio, 4),
        "ci95": round(interval, 4),
        "ratios": [round(value, 4) for value in ratios],
        **{
            field.name: [round(value, 3) for value in values]
            for field, values in zip(attrs.fields(Run), means, strict=True)
        },
    }


def _show(title: str, row: dict[str, Any]) -> None:
    def both(name: str, form: str) -> str:
        return " / ".join(format(value, form) for value in row[name])

    print(
        f"{title:16}{row['ratio']:.3f} ± {row['ci95']:.3f}   {both('makespan_s', '6.0f')}"
        f"   {both('reuse', '.2f')}   {both('fewest', '.0f')}   {both('preemptions', '.0f')}",
        flush=True,
    )


def _pooled(rows: dict[str, Any], *, is_plain: bool) -> tuple[float, float]:
    """Over workloads and sizes: the mean of each seed first, so that the interval is over seeds."""
    chosen = [row["ratios"] for title, row in rows.items() if title.endswith("plain") is is_plain]
    by_seed = [statistics.geometric_mean(seed) for seed in zip(*chosen, strict=True)]
    return ratio_and_half(by_seed)


def main() -> None:
    """Measure, print a table, and the result as the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=8, help="pairs of each case (default: 8)")
    parser.add_argument("--quick", action="store_true", help="2 seeds, two workloads")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: expected at least 2, for an interval")
    seeds, names = (2, ["agents", "single"]) if options.quick else (options.seeds, [*WORKLOADS])
    rows = compare(seeds, {name: (*WORKLOADS[name].memory, PLAIN) for name in names})
    (kv, kv_ci), (plain, plain_ci) = (_pooled(rows, is_plain=flag) for flag in (False, True))
    result = {
        "makespan_ratio_kv": round(kv, 4),
        "makespan_ratio_kv_ci95": round(kv_ci, 4),
        "makespan_ratio_plain": round(plain, 4),
        "makespan_ratio_plain_ci95": round(plain_ci, 4),
        "default": "on" if SchedulingConfig().adaptive_admission else "off",
        "seeds": seeds,
        "cases": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
