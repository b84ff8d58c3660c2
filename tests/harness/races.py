"""A harness for races: one situation, run again with an injection at each of its checkpoints.

A situation is an async function that does what a trainer does, with a `Recorder` in the place of
`rollout.open_rollout`. `explore` runs it once and counts the steps of its tasks: under one schedule
seed they are the same in every run. Then it runs it again and again, and lets something happen
just before step 1, before step 2, and so on. After each run the invariants must hold, and nothing
may be left.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from harness.race_run import INJECTIONS, RaceRun
from rollout.engine.cores.simulated.stable import stable_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.race_run import Situation

#: Virtual seconds after which a run is taken for hanging.
CEILING_S = 2000.0
#: Races that the error of `explore` spells out.
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Race:
    """An injection that broke an invariant.

    Attributes:
        injection: What happened.
        step: Before which step, counted from 1; 0: nothing was injected.
        seed: The schedule seed.
        anomalies: What was wrong afterwards.
    """

    injection: str
    step: int
    seed: int
    anomalies: tuple[str, ...]

    def __str__(self) -> str:
        again = f"replay(situation, {self.injection!r}, step={self.step}, seed={self.seed})"
        return again + "".join(f"\n    {text}" for text in self.anomalies)


@dataclass(frozen=True, slots=True)
class Exploration:
    """What `explore` did.

    Attributes:
        steps: By injection, the steps of the undisturbed run: the places at which it can happen.
        runs: Runs with an injection.
    """

    steps: Mapping[str, int]
    runs: int


class RacesFoundError(AssertionError):
    """Injections broke invariants; `races` has them all."""

    def __init__(self, races: Sequence[Race], runs: int) -> None:
        self.races = tuple(races)
        more = len(races) - _SHOWN
        super().__init__(
            f"{len(races)} of {runs} runs broke an invariant:\n"
            + "\n".join(map(str, races[:_SHOWN]))
            + (f"\nand {more} more" if more > 0 else "")
        )


def explore(
    situation: Situation,
    *,
    injections: Sequence[str] = INJECTIONS,
    share: float = 1.0,
    seed: int = 0,
    ceiling_s: float = CEILING_S,
) -> Exploration:
    """Run `situation` with every injection at every step of it.

    Args:
        situation: Opens its runtimes through the `Recorder` that it is given, and does nothing but
            wait for what is virtual: no threads, sockets or processes.
        injections: Some of `INJECTIONS`.
        share: How many of all runs are made, rounded up; `seed` chooses them. 1 makes them all.
        seed: The schedule seed.
        ceiling_s: Virtual seconds after which a run is taken for hanging.

    Raises:
        RacesFoundError: Some runs broke an invariant, each with the call of `replay` that shows it
            again; or the undisturbed run did.
    """
    unknown = sorted(set(injections) - set(INJECTIONS))
    if unknown:
        raise ValueError(f"injection {unknown[0]!r}: expected some of {', '.join(INJECTIONS)}")
    steps = {name: _undisturbed(situation, name, seed, ceiling_s) for name in injections}
    every = [(name, step) for name in injections for step in range(1, len(steps[name]) + 1)]
    chosen = sorted(every, key=lambda run: stable_share(seed, *run))[: ceil(share * len(every))]
    runs = (
        RaceRun(situation, name, seed, ceiling_s, step=step, expected=steps[name][step - 1])
        for name, step in chosen
    )
    races = [_race_of(run) for run in runs if run.anomalies]
    if races:
        raise RacesFoundError(races, len(chosen))
    return Exploration({name: len(steps[name]) for name in injections}, len(chosen))


def replay(
    situation: Situation,
    injection: str,
    *,
    step: int,
    seed: int = 0,
    ceiling_s: float = CEILING_S,
) -> list[str]:
    """The anomalies of one run of `explore`, alone."""
    steps = _undisturbed(situation, injection, seed, ceiling_s)
    expected = steps[step - 1] if 0 < step <= len(steps) else ""
    return RaceRun(situation, injection, seed, ceiling_s, step=step, expected=expected).anomalies


def _undisturbed(situation: Situation, injection: str, seed: int, ceiling_s: float) -> list[str]:
    """Names of the tasks that make the steps while nothing is injected."""
    run = RaceRun(situation, injection, seed, ceiling_s)
    if run.anomalies:
        raise RacesFoundError([_race_of(run)], 1)
    return run.steps


def _race_of(run: RaceRun) -> Race:
    return Race(run.injection, run.step, run.seed, tuple(run.anomalies))
