"""Requests per second and CPU per request: our channel, Ray actor calls and HTTP with orjson.

Every road carries the same: a prompt of 2k or 32k token ids there, 200 ids with 200 log-probs back.
The servers answer at once and live in processes of their own, so what is measured is the road and
nothing else. CPU is that of all processes a request passes: client, server and, with
`sglang-router`, the router (Ray's own daemons are not counted). Where the roads differ, the peers
get the easier way: Ray carries packed bytes, HTTP takes a list that was made beforehand and leaves
its answers as lists. Ours is measured from `Channel.submit_nowait` to the filled `Generation`, with
`EngineServer` over a core of ten lines at the other end: framing, handover to the core, deadlines,
bookkeeping and all; a real core adds its own work on every road.

`linear_64_turns` is a trajectory's turn 64 over its turn 2, in CPU, where each turn adds the same
tokens: 200 generated and 100 observed, 2k to 21k in all. Neither the driver nor the server looks at
the whole prefix again, but a core does: `none` is one that does not, `ids` looks at every id, and
`list` makes a list of them, which is what SGLang's interface wants. `turn_us` has the turns.

    python benchmarks/channel.py [--quick] [--roads channel,ray,http,router]

It needs `pip install 'rollout-rl[bench]'`; a road whose package is missing is a named error, unless
`--roads` leaves it out. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import time  # noqa: TID251  (a router is polled until it is up)
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wire import channel_client
from wire.payload import READINGS, Result, say

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
TOKENS, IN_FLIGHT = (2048, 32768), (1, 64, 1024)
ROADS = {
    "channel": ("uvloop",),
    "ray": ("ray", "uvloop"),
    "http": ("aiohttp", "orjson", "uvloop"),
    "router": ("aiohttp", "orjson", "uvloop", "sglang_router"),
}
START_S = 60.0
LINEAR_ROUNDS = 15


@contextmanager
def server(module: str, secret: bytes = b"", *options: str) -> Iterator[tuple[int, int]]:
    """A server's process: its id and its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *options],
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(secret)
        process.stdin.close()
        (port,) = struct.unpack("<H", process.stdout.read(2))
        yield process.pid, port
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def router(worker_port: int) -> Iterator[tuple[int, int]]:
    """`sglang-router` in front of one worker: its process's id and its port."""
    port = _free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "round_robin"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port())]
    command += ["--worker-urls", f"http://127.0.0.1:{worker_port}", "--log-level", "error"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_up(process, f"http://127.0.0.1:{port}/readiness")
        yield process.pid, port
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _wait_until_up(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"sglang-router did not come up (exit code {process.poll()})")


def cases(scale: float) -> Iterator[tuple[int, int, int, int]]:
    """Tokens, requests in flight, requests of a round, rounds."""
    for tokens in TOKENS:
        for in_flight in IN_FLIGHT:
            many = 12800 if tokens == TOKENS[0] else 1536
            count = 400 if in_flight == 1 else max(in_flight, int(many * scale))
            yield tokens, in_flight, count, 5


def slower(case: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Fewer requests, for roads that take ten times as long for each."""
    tokens, in_flight, count, rounds = case
    return tokens, in_flight, max(in_flight, count // 8), rounds


Measured = dict[tuple[int, int], list[Result]]


def run_channel(scale: float) -> tuple[Measured, dict[str, Any]]:
    """Our road, and the turns of a trajectory."""
    secret, measured = secrets.token_bytes(32), {}
    with server("wire.channel_server", secret) as (pid, port):
        for case in cases(scale):
            measured[case[:2]] = channel_client.measure(port, secret, pid, *case)
    turns: dict[str, Any] = {"linear_64_turns": {}, "turn_us": {}}
    for reading in READINGS:
        with server("wire.channel_server", secret, reading) as (pid, port):
            rounds = max(5, int(LINEAR_ROUNDS * scale))
            early, late, ratio = channel_client.linear(port, secret, pid, rounds)
        say(f"  {reading}: turn 2 {early:.1f} µs, turn 64 {late:.1f} µs")
        turns["linear_64_turns"][reading] = round(ratio, 3)
        turns["turn_us"][reading] = [round(early, 1), round(late, 1)]
    return measured, turns


def run_http(scale: float, *, through_router: bool) -> Measured:
    """HTTP with orjson, straight or through the router."""
    from wire import http_client

    measured = {}
    with server("wire.http_server") as (pid, port):
        if not through_router:
            url = f"http://127.0.0.1:{port}/generate"
            for case in map(slower, cases(scale)):
                measured[case[:2]] = http_client.measure(url, (pid,), *case)
            return measured
        with router(port) as (router_pid, router_port):
            url = f"http://127.0.0.1:{router_port}/generate"
            for case in map(slower, cases(scale)):
                measured[case[:2]] = http_client.measure(url, (pid, router_pid), *case)
    return measured


def run_ray(scale: float) -> Measured:
    """Calls of an actor."""
    planned = [slower(case) for case in cases(scale)]
    done = subprocess.run(
        [sys.executable, "-m", "wire.ray_client", json.dumps(planned)],
        cwd=HERE,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    return {
        case[:2]: [Result(*result) for result in json.loads(line)]
        for case, line in zip(planned, lines, strict=True)
    }


def check_packages(roads: list[str]) -> None:
    """Name what is missing before anything runs."""
    wanted = {package for road in roads for package in ROADS[road]}
    missing = sorted(name for name in wanted if importlib.util.find_spec(name) is None)
    if missing:
        names = ", ".join(name.replace("_", "-") for name in missing)
        raise SystemExit(
            f"benchmarks/channel.py: {names} cannot be imported; "
            "pip install 'rollout-rl[bench]', or name other --roads"
        )


def summary(measured: Measured) -> dict[str, dict[str, float]]:
    """Medians over the rounds, by case."""
    return {
        f"{tokens}x{in_flight}": {
            "requests_per_s": round(statistics.median(r.requests_per_s for r in results), 1),
            "cpu_us": round(statistics.median(r.cpu_us for r in results), 2),
        }
        for (tokens, in_flight), results in measured.items()
    }


def run(road: str, scale: float) -> tuple[Measured, dict[str, Any]]:
    """One road in all cases."""
    say(f"{road} …")
    gc.collect()
    match road:
        case "channel":
            return run_channel(scale)
        case "ray":
            return run_ray(scale), {}
        case _:
            return run_http(scale, through_router=road == "router"), {}


def main() -> None:
    """Measure, print a table and the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--roads", default=",".join(ROADS), help="some of " + ", ".join(ROADS))
    arguments = parser.parse_args()
    roads = arguments.roads.split(",")
    if not set(roads) <= ROADS.keys():
        parser.error(f"--roads {arguments.roads}: expected some of {', '.join(ROADS)}")
    check_packages(roads)
    result: dict[str, Any] = {}
    for road in roads:
        measured, further = run(road, 0.1 if arguments.quick else 1.0)
        result[road] = summary(measured)
        result.update(further)
        for case, figures in result[road].items():
            say(f"  {case:>11}  {figures['requests_per_s']:>10} /s {figures['cpu_us']:>10} µs CPU")
    compare(result)
    print(json.dumps(result))


def compare(result: dict[str, Any]) -> None:
    """Add the figures that are promised."""
    case = f"{TOKENS[0]}x64"
    ours = result.get("channel", {}).get(case)
    if ours is None:
        return
    result["cpu_us_64"] = ours["cpu_us"]
    for road in ("ray", "http", "router"):
        if road in result:
            ratio = ours["requests_per_s"] / result[road][case]["requests_per_s"]
            result[f"rps_over_{road}_64"] = round(ratio, 2)


if __name__ == "__main__":
    main()
