"""What a step loses to its slowest trajectories, and what each way of not waiting for them wins.

The whole library in virtual time, on one simulated engine with 64 places, whose step takes 20 ms
whatever runs in it: steps of 32 groups × 8. Lengths are log-normal (median 200, σ = 1, at most
6000); each trajectory calls a tool half-way, of which one call in a hundred takes 5 s and the
others 10 ms. A prompt's members have the same lengths in every mode, as often as it is started for
the first time; one that is started again samples afresh. Between two steps no time passes.

* `plain`: `generate`, step by step.
* `oversample`: `collect`, up to 1.5 times as many groups started, the surplus cancelled.
* `carry`: `collect`, twice as many, the surplus carried to the next step.
* `async`: `stream_groups` with ``max_staleness``; the consumer updates the weights for each 32
  groups taken.
* `members`: `collect` of 8 of 12 members.

`carry` and `async` run over the prompts of all steps and drain what is left. Gains are in
*delivered* tokens in a second over `plain`: counting trajectories would reward dropping the long
ones. Biases are mean lengths of what was taken over those of `plain`; `members_8_of_12_shown` is
the metric ``selection/length_bias``, which a user sees. `async_busy` is delivered tokens over
those of an engine whose places are never idle. Values are means over the seeds; `staleness_max`
and `carry_lost_tokens` are the worst.

    python benchmarks/long_tail.py [--seeds 3] [--steps 100] [--quick]

The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import anyio
import attrs
import msgspec

import rollout
from rollout import AgentContext, AgentLoop, GroupPolicy, Outcome, Prompt, ToolCall
from rollout.config import AgentConfig, LengthsConfig, SamplingConfig, SchedulingConfig
from rollout.engine import DiskWeights
from rollout.engine.cores.simulated.stable import stable_lognormal, stable_share
from rollout.errors import SourceEnded
from rollout.testing import Scenario, run_virtual

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout import RolloutConfig, RolloutRuntime, Trajectory

GROUPS, MEMBERS, PLACES = 32, 8, 64
STARTED_MEMBERS = 12
MEDIAN, SIGMA, LONGEST = 200.0, 1.0, 6000
TOKEN_S = 0.02
SLOW_SHARE, SLOW_S, QUICK_S = 0.01, 5.0, 0.01
MAX_STALENESS = 8
CEILING_S = 1e7

#: How often each member of the run at hand was started, and the run's seed.
_starts: Counter[tuple[str, int]] = Counter()
_seed = [0]


def length_of(seed: int, uid: str, member: int, start: int) -> int:
    """Tokens of a trajectory."""
    length = stable_lognormal(MEDIAN, SIGMA, seed, uid, member, start)
    return max(2, min(LONGEST, round(length)))


@rollout.function_tool
async def look(seconds: float) -> str:
    """Look something up.

    Args:
        seconds: How long that takes.
    """
    await anyio.sleep(seconds)
    return "found"


@rollout.register_agent("long_tail")
class LongTail(AgentLoop):
    """Says half of what it has to say, calls a tool, and says the rest."""

    async def run(self, context: AgentContext) -> None:
        """See `AgentLoop`."""
        uid, member = context.identity.uid, context.identity.member
        start = _starts[uid, member]
        _starts[uid, member] += 1
        length = length_of(_seed[0], uid, member, start)
        is_slow = stable_share(_seed[0], uid, member, start, "tool") < SLOW_SHARE
        await self._say(context, length // 2)
        call = ToolCall(name="look", arguments={"seconds": SLOW_S if is_slow else QUICK_S})
        await context.call_tools([call])
        await self._say(context, length - length // 2)
        context.end(Outcome.COMPLETED, "")

    async def _say(self, context: AgentContext, tokens: int) -> None:
        context.sampling = msgspec.structs.replace(context.sampling, max_new_tokens=tokens)
        await context.generate()


def config_of(seed: int, members: int, policy: GroupPolicy) -> RolloutConfig:
    """One engine of 64 places, always as fast."""
    scenario = (
        Scenario(seed=seed, stream_interval=1024)
        .reply("", finish="length")
        .timing(base_s=TOKEN_S, slope_s=0.0, prefill_tokens_per_s=None)
        .capacity(max_running=PLACES)
    )
    return scenario.config(
        agent=AgentConfig(name="long_tail"),
        lengths=LengthsConfig(prompt=2048, response=LONGEST + 512),
        sampling=SamplingConfig(max_new_tokens=LONGEST),
        channel=rollout.ChannelConfig(stream_interval_s=1e6),
        scheduling=SchedulingConfig(
            samples_per_prompt=members, max_in_flight=PLACES, groups=policy
        ),
    )


def prompts() -> Iterator[Prompt]:
    """Without an end."""
    for index in count():
        yield Prompt(messages=[{"role": "user", "content": "go"}], uid=f"p{index}")


@attrs.define
class Result:
    """What a mode did.

    Attributes:
        seconds: It took.
        lengths: Of the trajectories that were delivered.
        staleness: Of the groups that were.
        sampled: Tokens that the engine gave.
        metrics: Of each step.
    """

    seconds: float = 0.0
    lengths: list[int] = attrs.field(factory=list)
    staleness: list[int] = attrs.field(factory=list)
    sampled: int = 0
    metrics: list[dict[str, float]] = attrs.field(factory=list)

    def take(self, trajectories: list[Trajectory]) -> None:
        """These were delivered."""
        for trajectory in trajectories:
            assert trajectory.outcome is Outcome.COMPLETED, trajectory.cause
            self.lengths.append(trajectory.generated_length)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.lengths) / self.seconds

    @property
    def mean(self) -> float:
        return statistics.fmean(self.lengths)


async def plain(runtime: RolloutRuntime, steps: int, result: Result) -> None:
    source = prompts()
    for step in range(steps):
        batch = await runtime.generate(list(islice(source, GROUPS)), step=step)
        result.take(batch.trajectories)


async def collected(runtime: RolloutRuntime, steps: int, result: Result) -> None:
    source = prompts()
    for step in range(steps):
        batch = await runtime.collect(source, GROUPS, step=step)
        result.take(batch.trajectories)
        result.metrics.append(batch.metrics)
    result.seconds = anyio.current_time()


async def drained(runtime: RolloutRuntime, steps: int, result: Result) -> None:
    source = islice(prompts(), steps * GROUPS)
    for step in count():
        try:
            batch = await runtime.collect(source, GROUPS, step=step)
        except SourceEnded as error:
            result.take(list(error.partial.trajectories) if error.partial else [])
            return
        result.take(batch.trajectories)
        await runtime.update_weights(version=step + 1, source=DiskWeights("."))


async def streamed(runtime: RolloutRuntime, steps: int, result: Result) -> None:
    source, taken, version = islice(prompts(), steps * GROUPS), 0, 0
    async with runtime.stream_groups(
        source, step=0, max_staleness=MAX_STALENESS, groups_per_step=GROUPS
    ) as groups:
        async for group in groups:
            assert group.min_version is not None
            result.staleness.append(version - group.min_version)
            result.take(list(group.trajectories))
            taken += 1
            if taken % GROUPS == 0:
                version += 1
                await runtime.update_weights(version=version, source=DiskWeights("."))


MODES: dict[str, tuple[Any, int, GroupPolicy]] = {
    "plain": (plain, MEMBERS, GroupPolicy()),
    "oversample": (collected, MEMBERS, GroupPolicy(oversample=1.5)),
    "carry": (drained, MEMBERS, GroupPolicy(oversample=2.0, surplus="carry")),
    "async": (streamed, MEMBERS, GroupPolicy()),
    "members": (collected, STARTED_MEMBERS, GroupPolicy(members=MEMBERS)),
}


async def _run(mode: str, seed: int, steps: int) -> Result:
    work, members, policy = MODES[mode]
    result = Result()
    async with rollout.open_rollout(config_of(seed, members, policy), [look]) as runtime:
        began = anyio.current_time()
        await work(runtime, steps, result)
        result.seconds = anyio.current_time() - began
        result.sampled = runtime.statistics().generated_tokens
    return result


def measure(case: tuple[str, int, int]) -> Result:
    """One mode with one seed."""
    mode, seed, steps = case
    _seed[:] = [seed]
    _starts.clear()
    return run_virtual(partial(_run, mode, seed, steps), seed=seed, ceiling_s=CEILING_S)


def summary(results: dict[str, list[Result]]) -> dict[str, float]:
    """The figures, over all seeds."""

    def mean(figure: Any) -> float:
        values = [figure(*each) for each in zip(*results.values(), strict=True)]
        return round(statistics.fmean(values), 4)

    idle_free = PLACES / TOKEN_S
    return {
        "oversample_gain": mean(lambda p, o, c, a, m: o.tokens_per_s / p.tokens_per_s),
        "carry_gain": mean(lambda p, o, c, a, m: c.tokens_per_s / p.tokens_per_s),
        "async_gain": mean(lambda p, o, c, a, m: a.tokens_per_s / p.tokens_per_s),
        "async_busy": mean(lambda p, o, c, a, m: a.tokens_per_s / idle_free),
        "carry_lost_tokens": max(c.sampled - sum(c.lengths) for c in results["carry"]),
        "staleness_bound": MAX_STALENESS,
        "staleness_max": max(max(a.staleness) for a in results["async"]),
        "carry_length_bias": mean(lambda p, o, c, a, m: c.mean / p.mean),
        "async_length_bias": mean(lambda p, o, c, a, m: a.mean / p.mean),
        "oversample_length_bias": mean(lambda p, o, c, a, m: o.mean / p.mean),
        "members_8_of_12_bias": mean(lambda p, o, c, a, m: m.mean / p.mean),
        "members_8_of_12_shown": mean(
            lambda p, o, c, a, m: statistics.fmean(x["selection/length_bias"] for x in m.metrics)
        ),
    }


def main() -> None:
    """Run all modes with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="one seed, ten steps")
    options = parser.parse_args()
    seeds, steps = (1, 10) if options.quick else (options.seeds, options.steps)
    cases = [(mode, seed, steps) for seed in range(1, seeds + 1) for mode in MODES]
    results: dict[str, list[Result]] = {mode: [] for mode in MODES}
    with ProcessPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        for (mode, seed, _), result in zip(cases, pool.map(measure, cases), strict=True):
            results[mode].append(result)
            print(
                f"{mode:10} seed {seed}: {result.seconds:9.0f} s, {len(result.lengths):6} "
                f"trajectories, mean {result.mean:5.0f}, {result.tokens_per_s:5.0f} tokens/s",
                flush=True,
            )
    print(json.dumps(summary(results)))


if __name__ == "__main__":
    main()
