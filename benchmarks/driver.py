"""What the driver costs: CPU, stalls and memory, side by side with verl 0.9.1 on the same work.

Trajectories of 4 tool turns and a final answer, 5 generations of about 190 tokens, tools that
answer at once with 100 tokens. The engine answers as soon as all trajectories wait for it, turn by
turn: the worst case of a rollout step. Ours lives in a child process behind a loopback socket
(`local_process`), and its CPU does not count; verl's ToolAgentLoop and AgentLoopWorker, unmodified,
get the same answers from an object in their process. Both use the same tokenizer and make the same
ids and masks, which is checked (`equal_tokens`). Sides take turns in processes of their own, and
each figure is the median over the rounds; progress goes to stderr.

    python benchmarks/driver.py [--quick] [--cases turns,padding] [--without-verl | --no-setup]

verl gets an environment of its own, `.venv-verl`, the first time that it is wanted: 2 GB. The last
line is the result as JSON:

    ratio_loop_256         verl's agent loops over our `stream`: CPU a generation, all threads
    ratio_worker_256       its worker, which also pads, over our `generate`
    flat_10000             CPU a generation with 10,000 trajectories over that with 256, `stream`
                           or `generate`, whichever grows more; flat_10000_asyncio on asyncio
    flat_64_turns          … with 64 tool turns over 4, or of the last 8 turns over the first 8,
                           whichever is more
    stall_ms_N             longest CPU time of the loop's thread between two ticks of 5 ms, in
                           `stream` or `generate`, with N trajectories
    first_generate_stall_ms  … in the first `generate` of a process
    bytes_per_token        resident memory that two further batches of 10,000 finished trajectories
                           add, for each token
    first_bytes_per_token  … that the first one adds, with what its agents took while they ran
    kb_idle                … that a running agent takes, 100,000 of which await their engine
    collate_ratio          verl's padding of 1024 x (1024 + 4096) over `collate`, CPU
    collate_stall_ms       longest stall from the end of the last trajectory to `generate`'s return
    open_cpu_s, open_wall_s  from the first import until the embedded engine serves
    open_over_imports        that CPU over importing torch, tensordict and transformers alone
    details                medians by case and side

Our side alone, in this process, for a profiler:

    python benchmarks/driver.py --ours [--n 256] [--scope generate] [--backend asyncio] …
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time  # noqa: TID251  (people want to know how long it took)
from pathlib import Path
from typing import Any

import anyio
import attrs
from driver_cases.alternation import medians, say
from driver_cases.cases import CASES, QUICK, WITH_VERL, Bench, Sizes
from driver_cases.measuring import calibration_ms
from driver_cases.ours import Plan, open_ours
from driver_cases.side_process import SideFailed
from driver_cases.workload import TURNS, save_workload
from peer_verl import environment

WORKLOAD = Path(__file__).parents[1] / "build" / "driver" / "workload"
#: What is measured of our side alone, where nothing else is said.
OURS = {"n": 256, "turns": TURNS, "scope": "stream", "backend": "trio"}
#: What must hold: ratios to verl at least, all else at most.
PROMISED = {
    "ratio_loop_256": 3.0,
    "ratio_worker_256": 4.5,
    "flat_10000": 1.3,
    "flat_10000_asyncio": 1.3,
    "flat_64_turns": 1.3,
    "stall_ms_256": 50.0,
    "stall_ms_4096": 100.0,
    "stall_ms_10000": 100.0,
    "stall_ms_10000_asyncio": 100.0,
    "first_generate_stall_ms": 100.0,
    "bytes_per_token": 20.0,
    "kb_idle": 20.0,
    "collate_ratio": 10.0,
    "collate_stall_ms": 50.0,
    "open_cpu_s": 4.0,
    "open_wall_s": 6.0,
}


async def our_rounds(plan: Plan, scope: str, rounds: int) -> list[dict[str, Any]]:
    """A round that does not count, and `rounds` that do."""
    async with open_ours(plan) as side:
        return [await side.round(scope) for _ in range(rounds + 1)][1:]


def run_ours(asked: argparse.Namespace) -> dict[str, Any]:
    """Our side in this process."""
    plan = Plan(directory=str(WORKLOAD), n=asked.n, turns=asked.turns, barrier=asked.barrier)
    act = functools.partial(our_rounds, plan, asked.scope, asked.rounds or 5)
    rounds: list[dict[str, Any]] = anyio.run(act, backend=asked.backend)
    for each in rounds:
        say(json.dumps(medians([each])))
    return medians(rounds)


def run_cases(asked: argparse.Namespace) -> dict[str, Any]:
    """The cases asked for, one after the other."""
    sizes = QUICK if asked.quick else Sizes()
    if asked.rounds:
        sizes = attrs.evolve(sizes, rounds=asked.rounds)
    bench = Bench(
        directory=str(WORKLOAD), sizes=sizes, barrier=asked.barrier, has_verl=has_peer(asked)
    )
    for name in asked.cases:
        say(f"{name}: {(CASES[name].__doc__ or '').strip()}")
        begun = time.monotonic()
        try:
            CASES[name](bench)
        except SideFailed as failure:
            say(f"{name}: {failure}")
            bench.details[name] = {"failed": str(failure)}
        finally:
            bench.close()
        say(f"{name}: {time.monotonic() - begun:.0f} s")
    report(bench.figures)
    figures = {key: rounded(value) for key, value in bench.figures.items()}
    return {**figures, "details": bench.details}


def has_peer(asked: argparse.Namespace) -> bool:
    """Whether verl can be compared with; sets it up where that is wanted."""
    if asked.without_verl or not set(asked.cases) & set(WITH_VERL):
        return False
    if not asked.no_setup:
        environment.set_up()
    elif not environment.is_ready():
        say(f"no {environment.VENV}: what compares with verl is left out; make bench-verl")
        return False
    return True


def report(figures: dict[str, Any]) -> None:
    """A table with what was promised."""
    for key, value in figures.items():
        promised = PROMISED.get(key)
        if promised is None:
            say(f"{key:>25} {rounded(value)!s:>10}")
            continue
        is_ratio = key.startswith(("ratio", "collate_ratio"))
        reached = value >= promised if is_ratio else value <= promised
        wanted = f"{'≥' if is_ratio else '≤'} {promised:g}"
        say(f"{key:>25} {rounded(value)!s:>10}  {wanted:>7}{'' if reached else '  short of it'}")


def rounded(value: Any) -> Any:
    """To three digits after the point."""
    return round(value, 3) if isinstance(value, float) else value


def names(text: str) -> list[str]:
    """Of cases.

    Raises:
        argparse.ArgumentTypeError: One is unknown.
    """
    unknown = [name for name in text.split(",") if name not in CASES]
    if unknown:
        known = ", ".join(CASES)
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected some of {known}")
    return text.split(",")


def at_least_one(text: str) -> int:
    """A number of rounds, trajectories or turns.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer ≥ 1")
    return int(text)


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, fewer trajectories")
    parser.add_argument("--cases", type=names, help="some of " + ",".join(CASES))
    parser.add_argument("--rounds", type=at_least_one, help="that count (5; --quick: 2)")
    parser.add_argument(
        "--barrier",
        choices=("rounds", "first", "none"),
        default="rounds",
        help="the answers of which turns are held until all trajectories wait (rounds: of all)",
    )
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument("--without-verl", action="store_true", help="our side alone")
    peer.add_argument(
        "--no-setup", action="store_true", help="the same where .venv-verl is missing"
    )
    ours = parser.add_argument_group("our side alone, in this process")
    ours.add_argument("--ours", action="store_true")
    ours.add_argument("--n", type=at_least_one, help="trajectories, all in flight at once (256)")
    ours.add_argument("--turns", type=at_least_one, help=f"that call a tool ({TURNS})")
    ours.add_argument("--scope", choices=("stream", "generate"), help="(stream)")
    ours.add_argument("--backend", choices=("trio", "asyncio"), help="(trio)")
    asked = parser.parse_args()
    of_others = ("quick", "cases", "without_verl", "no_setup") if asked.ours else tuple(OURS)
    for name in of_others:
        if getattr(asked, name):
            sides = "without" if asked.ours else "with"
            parser.error(f"--{name.replace('_', '-')}: expected {sides} --ours")
    asked.cases = asked.cases or list(CASES)
    for name, default in OURS.items():
        if getattr(asked, name) is None:
            setattr(asked, name, default)
    return asked


def main() -> int:
    """Measure and print; the exit code."""
    asked = arguments()
    save_workload(WORKLOAD)
    before = calibration_ms()
    result = run_ours(asked) if asked.ours else run_cases(asked)
    result["calibration_ms"] = [round(ms, 2) for ms in (before, calibration_ms())]
    print(json.dumps(result))
    has_failed = any("failed" in each for each in result.get("details", {}).values())
    return 1 if has_failed or result.get("equal_tokens") is False else 0


if __name__ == "__main__":
    sys.exit(main())
