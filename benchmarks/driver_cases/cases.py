"""The cases of the driver's benchmark: which sides run, and which figures come of it."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs
from peer_verl import environment

from driver_cases.alternation import Figures, alternate, median, medians, ratio, say
from driver_cases.side_process import SideProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Turns of a long trajectory, and how many at its start and its end are compared.
LONG, ENDS = 64, 8
PROMPT, RESPONSE = 1024, 4096
#: An answer of about 197 tokens so many times over fills a response.
FILLING = 20


@attrs.frozen(kw_only=True)
class Sizes:
    """How much is run.

    Attributes:
        rounds: Of each side that count; the figures are medians over them.
        small, middle, large: Trajectories in flight.
        idle: Agents that await their engines.
        rows: Whose padding is compared.
    """

    rounds: int = 5
    small: int = 256
    middle: int = 4096
    large: int = 10_000
    idle: int = 100_000
    rows: int = 1024


QUICK = Sizes(rounds=2, small=256, middle=1024, large=2048, idle=10_000, rows=256)


@attrs.frozen
class Bench:
    """What the cases start, and what they found.

    Attributes:
        directory: Of the workload.
        barrier: See `ours.Plan`.
        figures: The promised ones, by their keys.
        details: Everything else that was measured.
    """

    directory: str
    sizes: Sizes
    barrier: str = "rounds"
    has_verl: bool = True
    figures: Figures = attrs.field(factory=dict)
    details: Figures = attrs.field(factory=dict)
    _sides: ExitStack = attrs.field(factory=ExitStack)

    def close(self) -> None:
        """End what was started."""
        self._sides.close()

    def ours(self, n: int, backend: str = "trio", **plan: Any) -> SideProcess:
        """Rounds through our runtime."""
        options = {"directory": self.directory, "n": n, "barrier": self.barrier, **plan}
        return self._side("driver_cases.our_turns", {"backend": backend, **options})

    def verl(self, n: int, scope: str) -> SideProcess:
        """Rounds through verl."""
        options = {"directory": self.directory, "n": n, "scope": scope, "barrier": self.barrier}
        return self._side("peer_verl.turns", options, str(environment.PYTHON))

    def once(self, module: str, options: Figures) -> Figures:
        """What a process says that measures once."""
        side = SideProcess(module, options)
        side.close()
        return side.first

    def _side(self, module: str, options: Figures, *python: str) -> SideProcess:
        side = SideProcess(module, options, *python)
        self._sides.callback(side.close)
        return side

    def keep(self, name: str, found: dict[str, list[Figures]]) -> None:
        """Keep the medians of all sides, and see whether they made the same tokens."""
        self.details[name] = {side: medians(rounds) for side, rounds in found.items()}

    def check_tokens(self, name: str, rounds: Iterable[Figures]) -> None:
        """Say so where sides that did the same work have other ids, masks or values."""
        digests = {each["digest"] for each in rounds}
        self.figures["equal_tokens"] = self.figures.get("equal_tokens", True) and len(digests) == 1
        if len(digests) > 1:
            say(f"{name}: the sides do not agree: {sorted(digests)}; see details for each one's")


def turns(bench: Bench) -> None:
    """A generation's CPU against verl's, and the longest stall, with few trajectories."""
    n = bench.sizes.small
    ours = bench.ours(n)
    acts: dict[str, Callable[[], Figures]] = {
        "ours_stream": lambda: ours.ask(scope="stream"),
        "ours_generate": lambda: ours.ask(scope="generate"),
    }
    if bench.has_verl:
        acts |= {f"verl_{scope}": bench.verl(n, scope).ask for scope in ("loop", "worker")}
    found = alternate(acts, bench.sizes.rounds)
    bench.keep("turns", found)
    bench.check_tokens("turns", [each for rounds in found.values() for each in rounds])
    if bench.has_verl:
        loop, stream = found["verl_loop"], found["ours_stream"]
        bench.figures[f"ratio_loop_{n}"] = ratio(loop, stream, "cpu_ms")
        worker, generate = found["verl_worker"], found["ours_generate"]
        bench.figures[f"ratio_worker_{n}"] = ratio(worker, generate, "cpu_ms")
    scopes = [found[f"ours_{scope}"] for scope in ("stream", "generate")]
    bench.figures[f"stall_ms_{n}"] = max(median(rounds, "stall_ms") for rounds in scopes)


def growth(bench: Bench) -> None:
    """What becomes of a generation's CPU and of the longest stall with many trajectories."""
    _grow(bench, "trio", (bench.sizes.middle, bench.sizes.large))


def growth_asyncio(bench: Bench) -> None:
    """The same on asyncio."""
    _grow(bench, "asyncio", (bench.sizes.large,))


def _grow(bench: Bench, backend: str, sizes: tuple[int, ...]) -> None:
    """Figures for `stream` and `generate`; of both the worse counts."""
    small, large = bench.sizes.small, sizes[-1]
    suffix = "" if backend == "trio" else f"_{backend}"
    sides = {n: bench.ours(n, backend) for n in (small, *sizes)}
    scopes = ("stream", "generate")
    sides[small].ask(scope="generate")  # a warm-up; with many trajectories it does not show

    def act(n: int, scope: str) -> Callable[[], Figures]:
        return lambda: sides[n].ask(scope=scope)

    acts = {f"{scope}_{n}": act(n, scope) for scope in scopes for n in sides}
    found = alternate(acts, bench.sizes.rounds, warm_ups=0)
    bench.keep(f"growth{suffix}", found)
    bench.figures[f"flat_{large}{suffix}"] = max(
        ratio(found[f"{scope}_{large}"], found[f"{scope}_{small}"], "cpu_ms") for scope in scopes
    )
    for n in sizes:
        stalls = [median(found[f"{scope}_{n}"], "stall_ms") for scope in scopes]
        bench.figures[f"stall_ms_{n}{suffix}"] = max(stalls)


def long_trajectories(bench: Bench) -> None:
    """A generation of trajectories with 64 turns over one of those with 4, and within them."""
    n = bench.sizes.small
    short, long = bench.ours(n), bench.ours(n, turns=LONG)
    acts = {
        "short": lambda: short.ask(scope="stream"),
        "long": lambda: long.ask(scope="stream"),
    }
    # The ends are an eighth of a round each, whose cost differs more than that of a whole one.
    found = alternate(acts, 3 * bench.sizes.rounds)
    bench.keep("long", found)
    whole = ratio(found["long"], found["short"], "cpu_ms")
    within = statistics.median(
        sum(each["turn_s"][-ENDS:]) / sum(each["turn_s"][:ENDS]) for each in found["long"]
    )
    bench.details["long"] |= {"over_short": round(whole, 3), "late_over_early": round(within, 3)}
    bench.figures[f"flat_{LONG}_turns"] = max(whole, within)


def first(bench: Bench) -> None:
    """The longest stall in the first `generate` of a process."""

    def act() -> Figures:
        side = bench.ours(bench.sizes.small)
        figures = side.ask(scope="generate")
        side.close()
        return figures

    found = alternate({"first": act}, bench.sizes.rounds, warm_ups=0)
    bench.keep("first", found)
    bench.figures["first_generate_stall_ms"] = median(found["first"], "stall_ms")


def memory(bench: Bench) -> None:
    """Bytes of resident memory for a token."""
    options = {"what": "tokens", "directory": bench.directory, "n": bench.sizes.large}
    bench.details["memory"] = bench.once("driver_cases.memory", options)
    for name in ("bytes_per_token", "first_bytes_per_token"):
        bench.figures[name] = bench.details["memory"][name]


def idle(bench: Bench) -> None:
    """Kilobytes for an agent that awaits its engine."""
    options = {"what": "idle", "directory": bench.directory, "n": bench.sizes.idle}
    bench.details["idle"] = bench.once("driver_cases.memory", options)
    bench.figures["kb_idle"] = bench.details["idle"]["kb_idle"]
    ended = bench.details["idle"]["ended"]
    if set(ended) != {"cancelled"}:
        say(f"    cancelled all at once, they ended as {ended}")


def padding(bench: Bench) -> None:
    """Padding against verl's, and how long it stalls the loop at the end of `generate`."""
    options: Figures = {"rows": bench.sizes.rows, "prompt": PROMPT, "response": RESPONSE}
    sides = {"ours": bench._side("driver_cases.our_padding", options)}
    if bench.has_verl:
        options |= {"directory": bench.directory}
        sides["verl"] = bench._side("peer_verl.padding", options, str(environment.PYTHON))
    found = alternate({name: side.ask for name, side in sides.items()}, bench.sizes.rounds)
    bench.keep("padding", found)
    bench.check_tokens("padding", [each for rounds in found.values() for each in rounds])
    if bench.has_verl:
        bench.figures["collate_ratio"] = ratio(found["verl"], found["ours"], "cpu_ms")
    side = bench.ours(bench.sizes.rows, turns=0, repeat=FILLING, response=RESPONSE)
    stalls = alternate({"generate": lambda: side.ask(scope="generate")}, bench.sizes.rounds)
    bench.keep("collate_stall", stalls)
    bench.figures["collate_stall_ms"] = median(stalls["generate"], "end_stall_ms")


def opening(bench: Bench) -> None:
    """Until the embedded engine serves; and how much of it is importing other packages."""

    def act(what: str) -> Callable[[], Figures]:
        return lambda: bench.once("driver_cases.opening", {"what": what})

    found = alternate({what: act(what) for what in ("open", "imports")}, bench.sizes.rounds)
    bench.keep("open", found)
    bench.figures["open_over_imports"] = ratio(found["open"], found["imports"], "cpu_s")
    bench.figures["open_cpu_s"] = median(found["open"], "cpu_s")
    bench.figures["open_wall_s"] = median(found["open"], "wall_s")


CASES: dict[str, Callable[[Bench], None]] = {
    "turns": turns,
    "growth": growth,
    "growth_asyncio": growth_asyncio,
    "long": long_trajectories,
    "first": first,
    "memory": memory,
    "idle": idle,
    "padding": padding,
    "open": opening,
}
#: Those that compare with verl.
WITH_VERL = ("turns", "padding")
