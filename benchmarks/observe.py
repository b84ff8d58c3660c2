"""What observing a run costs its driver: CPU of a turn with and without readers of its events.

Rounds of trajectories with tools through `open_rollout`, on an engine in another process that
answers at once, so that the driver's own CPU is all there is: of all threads of the process, with
what readers do in theirs. All kinds of round run in one process and one runtime, in turn, and each
is compared with its neighbours:

* silent: the code of every function that tells something is swapped for the same without that;
* off: as it is, with no reader attached;
* sampled: 1 % of the trajectories traced, to OpenTelemetry's SDK;
* full: all of them traced, and all events written to disk;
* prometheus: all events counted for Prometheus.

The CPU of one piece of work differs by a tenth from one time to the next where the machine is
shared, so that rounds are short and many: 120 cycles, of some five minutes, say a ratio to two
hundredths.

The last line is the result as JSON: `off_ratio` (off ÷ silent, A/B/A), `aa_ratio` (silent ÷ silent,
of the same rounds), `sampled_ratio`, `full_ratio` and `prometheus_ratio` (÷ off), medians over the
cycles; `half_intervals`: of each what its 95 % interval extends to either side; `turn_us`: CPU of a
turn with no reader; `told`: functions that tell something; and those of the report of 5,000
trajectories, see observe_report.py.

    python benchmarks/observe.py [--quick] [--cycles 120] [--n 64]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time  # noqa: TID251  (what is measured here is CPU time)
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import attrs
from driver_cases.alternation import say
from driver_cases.ours import Plan, Tools, config_of, prompts_of
from driver_cases.workload import save_workload
from intervals import ratio_and_half
from observe_cases.silencing import Silence
from observe_report import report_figures

import rollout
from rollout.clocks import wall
from rollout.observe.event_file import EventFile
from rollout.observe.events import RunStarted
from rollout.observe.traces import Tracer

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKLOAD = Path(__file__).parents[1] / "build" / "driver" / "workload"
#: What is promised.
PROMISED = {
    "off_ratio": 1.02,
    "sampled_ratio": 1.03,
    "full_ratio": 1.3,
    "report_mb": 80,
    "report_open_s": 2,
}
#: One cycle: each round is compared with those beside it.
CYCLE = ("silent", "off", "silent", "off", "sampled", "off", "full", "off", "prometheus", "off")


@attrs.define
class Rounds:
    """Rounds of one runtime.

    Attributes:
        silence: What takes the telling out.
    """

    runtime: rollout.RolloutRuntime
    plan: Plan
    silence: Silence = attrs.field(factory=Silence)

    async def run(self, kind: str) -> float:
        """CPU microseconds of a turn in one round."""
        prompts = prompts_of(self.plan.n)
        gc.collect()  # what the round before left
        with self._silent() if kind == "silent" else self._observed(kind) as closing:
            began = time.process_time()
            async with self.runtime.stream(prompts) as trajectories:
                ended = [each async for each in trajectories]
            for reader in closing:
                reader.close()  # with what its thread has left to do
            spent = time.process_time() - began
        if any(each.outcome != "completed" for each in ended):
            raise SystemExit(f"{kind}: {ended[0].outcome}, {ended[0].cause}")
        return spent / self.plan.generations * 1e6

    @contextmanager
    def _silent(self) -> Iterator[list[Any]]:
        self.silence.begin()
        try:
            yield []
        finally:
            self.silence.end()

    @contextmanager
    def _observed(self, kind: str) -> Iterator[list[Any]]:
        events = self.runtime.services.events
        with tempfile.TemporaryDirectory() as directory:
            readers = readers_of(kind, directory)
            for reader in readers:
                reader(RunStarted(at=0.0, wall_s=wall()), None)
                events.attach(
                    reader,
                    wants=getattr(reader, "wants", None),
                    kinds=getattr(reader, "kinds", None),
                )
            yield [reader for reader in readers if not hasattr(reader, "port")]
            for reader in readers:
                events.detach(reader)


def readers_of(kind: str, directory: str) -> list[Any]:
    """Those of one kind of round."""
    if kind == "off":
        return []
    if kind == "prometheus":
        return list(PROMETHEUS)
    from rollout.observe.backends.otel import Backend

    if kind == "sampled":
        return [Tracer(Backend("benchmark"), 0.01)]
    return [Tracer(Backend("benchmark"), 1.0), EventFile(directory)]


PROMETHEUS: list[Any] = []


def set_provider() -> None:
    """The SDK's provider, with an exporter to which all is one."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import (
        SimpleSpanProcessor,
        SpanExporter,
        SpanExportResult,
    )

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)


async def measured(n: int, cycles: int) -> dict[str, Any]:
    """The figures."""
    from rollout.observe.prometheus import PrometheusEndpoint

    set_provider()
    PROMETHEUS.append(PrometheusEndpoint(0))
    plan = Plan(directory=str(WORKLOAD), n=n)
    found: list[dict[str, list[float]]] = []
    tools = Tools(plan.n)
    async with rollout.open_rollout(config_of(plan), tools.functions()) as runtime:
        rounds = Rounds(runtime, plan)
        for number in range(-1, cycles):
            spent: dict[str, list[float]] = {}
            for kind in CYCLE:
                spent.setdefault(kind, []).append(await rounds.run(kind))
            shown = {kind: [round(us, 1) for us in all_us] for kind, all_us in spent.items()}
            say(f"    {json.dumps(shown)}{'' if number >= 0 else ' (warm-up)'}")
            if number >= 0:
                found.append(spent)
    PROMETHEUS.pop().close()
    return ratios(found) | {"told": rounds.silence.functions}


def ratios(found: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Of each cycle, each round against the mean of its two neighbours; medians over the cycles."""

    def beside(of: float, one: float, other: float) -> float:
        return of / ((one + other) / 2)

    cycles = [
        {
            "off_ratio": beside(each["off"][0], *each["silent"]),
            "aa_ratio": each["silent"][1] / each["silent"][0],
            "sampled_ratio": beside(each["sampled"][0], each["off"][1], each["off"][2]),
            "full_ratio": beside(each["full"][0], each["off"][2], each["off"][3]),
            "prometheus_ratio": beside(each["prometheus"][0], each["off"][3], each["off"][4]),
        }
        for each in found
    ]
    by_name = {name: [each[name] for each in cycles] for name in cycles[0]}
    return {
        **{name: statistics.median(each) for name, each in by_name.items()},
        "half_intervals": {n: round(ratio_and_half(each)[1], 4) for n, each in by_name.items()},
        "turn_us": statistics.median(us for each in found for us in each["off"]),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer cycles")
    parser.add_argument("--n", type=int, default=64, help="trajectories, all in flight at once")
    parser.add_argument("--cycles", type=int, help="that count (120; --quick: 12)")
    asked = parser.parse_args()
    save_workload(WORKLOAD)
    cycles = asked.cycles or (12 if asked.quick else 120)
    figures = anyio.run(measured, asked.n, cycles, backend="trio")
    figures = {
        n: round(each, 4) if isinstance(each, float) else each for n, each in figures.items()
    }
    figures |= report_figures()
    for name, value in figures.items():
        wanted = f"≤ {PROMISED[name]:g}" if name in PROMISED else ""
        short = name in PROMISED and value > PROMISED[name]
        say(f"{name:>20} {value!s:>10}  {wanted}{'  short of it' if short else ''}")
    print(json.dumps(figures | {"n": asked.n}))


if __name__ == "__main__":
    main()
