"""What a run was, in a few words and figures."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rollout.plurals import count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.observe.events import BatchStarted
    from rollout.observe.report.finding import Run

Fact = tuple[str, str]


def summary_of(run: Run) -> list[tuple[str, str, str]]:
    """The figures at the top of the page: name, value, and what else there is to say."""
    rows = run.endings
    rewards = [row.reward for row in rows if row.reward is not None]
    sampled = sum(row.generated for row in rows)
    groups = len({row.group_key for row in rows})
    outcomes = Counter(row.outcome for row in rows)
    told = [("trajectories", f"{len(rows):,}", f"of {count(groups, 'prompt')}")]
    if rows:
        first, number = outcomes.most_common(1)[0]
        told.append((first, f"{100 * number / len(rows):.0f} %", _others(outcomes, first)))
    if rewards:
        span = f"{min(rewards):.3g} … {max(rewards):.3g}"
        told.append(("mean reward", f"{fmean(rewards):.3f}", span))
    told.append(("sampled tokens", f"{sampled:,}", f"{_mean(sampled, len(rows)):,.0f} each"))
    if run.duration:
        calls_of = f"in {len(run.batches)} calls, " if len(run.batches) > 1 else ""
        pace = f"{sampled / run.duration:,.0f} tokens a second"
        told.append(("took", _duration(run.duration), f"{calls_of}{pace}"))
    calls = sum(row.calls for row in rows)
    if calls:
        errors = sum(row.errors for row in rows)
        told.append(("tool calls", f"{calls:,}", count(errors, "error") if errors else "no errors"))
    return told


def _others(outcomes: Counter[str], first: str) -> str:
    rest = [f"{number:,} {name}" for name, number in outcomes.most_common() if name != first]
    return ", ".join(rest)


def _mean(total: float, number: int) -> float:
    return total / number if number else 0.0


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def run_facts(run: Run) -> list[Fact]:
    """What was asked for, of what, and when; as far as it is recorded."""
    started, facts = run.times.run, []
    if started is not None:
        config = started.config
        begun = datetime.fromtimestamp(started.wall_s).strftime("%Y-%m-%d %H:%M:%S")
        facts += [("started", begun), ("rollout", started.version), *_of_config(config)]
        facts.append(("seed", str(started.run_seed)))
    for batch in run.times.batches[-3:]:
        facts.append((f"{batch.call}()", _asked(batch)))
    sources = Counter(name for row in run.rows for name in row.tools)
    if sources:
        facts.append(("tools used", ", ".join(sorted(sources))))
    versions = sorted({version for row in run.rows for version in row.versions})
    if versions:
        told = str(versions[0]) if len(versions) == 1 else f"{versions[0]} … {versions[-1]}"
        facts.append(("weight versions", told))
    return [(name, value) for name, value in facts if value]


def _asked(batch: BatchStarted) -> str:
    """What a call asks for, as far as that is known when it begins."""
    asked = [f"step {batch.step}", "validation" if batch.validate else ""]
    if batch.trajectories:
        asked.append(count(batch.trajectories, "trajectory"))
    elif batch.prompts:  # of `collect`, which may start more than it wants
        asked.append(count(batch.prompts, "group"))
    return ", ".join(filter(None, asked))


def _of_config(config: Mapping[str, Any]) -> list[Fact]:
    def at(section: str, field: str) -> str:
        value = config.get(section)
        value = value.get(field) if isinstance(value, dict) else None
        return "" if value is None else str(value)

    replicas = at("engine", "replicas")
    engine = f"{replicas} × {at('engine', 'kind')}" if replicas else at("engine", "kind")
    return [
        ("model", at("model", "path")),
        ("engines", ", ".join(filter(None, (engine, at("placement", "kind"))))),
        ("agent", at("agent", "name")),
        ("temperature", at("sampling", "temperature")),
        ("in flight at most", at("scheduling", "max_in_flight")),
        ("samples of a prompt", at("scheduling", "samples_per_prompt")),
        ("response tokens at most", at("lengths", "response")),
    ]
