"""What became of a batch, in a few lines for people."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from typing import TYPE_CHECKING

from rollout.plurals import count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rollout.batch import RolloutBatch

_LABEL_WIDTH = 10
#: Trajectories whose failure is spelled out; the others are in the files.
MAX_CAUSES = 3


def summary_lines(
    batch: RolloutBatch,
    seconds: float,
    directory: Path,
    files: Sequence[str] | None = None,
    *,
    is_resumed: bool = False,
) -> list[str]:
    """Lines ``label  text``: rows, outcomes with reasons, tokens, reward, seconds, files.

    Args:
        batch: With the trajectories that it was made of.
        seconds: What it took, from its start to its end.
        directory: Where it was saved.
        files: What of it was; None: all.
        is_resumed: Some of it may be from before `seconds` began.
    """
    entries = [
        ("rows", _rows(batch, seconds, is_resumed)),
        ("outcomes", _outcomes(batch)),
        ("tokens", _tokens(batch, 0.0 if is_resumed else seconds)),
        ("tools", _tools(batch)),
        ("reward", _reward(batch)),
        *(("cause", cause) for cause in _causes(batch)),
        ("files", _files(directory, files)),
    ]
    if files is None:
        quoted = shlex.quote(str(directory))
        entries.append(("report", f"`rollout report {quoted}` shows where the time went"))
    return [f"{label:<{_LABEL_WIDTH}}{text}" for label, text in entries]


def _rows(batch: RolloutBatch, seconds: float, is_resumed: bool) -> str:
    prompts = len({row.group for row in batch.trajectories})
    trainable = sum(row.trainable for row in batch.trajectories)
    trajectories = count(len(batch.trajectories), "trajectory")
    took = f"{seconds:.1f} s" + (" since it was resumed" if is_resumed else "")
    return f"{trajectories} of {count(prompts, 'prompt')} in {took}; {trainable:,} trainable"


def _outcomes(batch: RolloutBatch) -> str:
    counts = Counter(
        f"{row.outcome} ({row.reason})" if row.reason else str(row.outcome)
        for row in batch.trajectories
    )
    return ", ".join(f"{n:,} {name}" for name, n in counts.most_common()) or "none"


def _tokens(batch: RolloutBatch, seconds: float) -> str:
    transcripts = [transcript for row in batch.trajectories for transcript in row.transcripts]
    prompt = sum(transcript.prompt_length for transcript in transcripts)
    generated = sum(transcript.generated_length for transcript in transcripts)
    observed = sum(transcript.response_length for transcript in transcripts) - generated
    speed = f" ({generated / seconds:,.0f} a second)" if seconds > 0 else ""
    return f"{prompt:,} prompt, {generated:,} generated{speed}, {observed:,} observed"


def _tools(batch: RolloutBatch) -> str:
    """Calls and errors: of all, and of each tool that answered with errors."""
    metrics: Counter[str] = Counter()
    for row in batch.trajectories:
        metrics.update(row.metrics)
    calls, errors = int(metrics["tool_calls"]), int(metrics["tool_errors"])
    if not calls:
        return "no calls"
    erring = {
        name.removeprefix("tool/").removesuffix("/errors"): (int(number), int(metrics[of]))
        for name, number in metrics.items()
        if name.startswith("tool/") and name.endswith("/errors") and number
        for of in [f"{name.removesuffix('/errors')}/calls"]
    }
    listed = sorted(erring.items(), key=lambda each: -each[1][0])
    told = ", ".join(f"{name} {failed:,} of {of:,}" for name, (failed, of) in listed)
    said = count(errors, "error") if errors else "no errors"
    return f"{count(calls, 'call')}, {said}" + (f" ({told})" if told else "")


def _reward(batch: RolloutBatch) -> str:
    known = [row.reward for row in batch.samples if row.reward is not None]
    if not known:
        return "unknown for every row"
    mean = math.fsum(known) / len(known)
    missing = len(batch) - len(known)
    return f"mean {mean:.3f} over {count(len(known), 'row')}" + (
        f", unknown for {missing:,}" if missing else ""
    )


def _causes(batch: RolloutBatch) -> list[str]:
    """What failed trajectories failed of, the most frequent first."""
    counts = Counter(
        f"{row.outcome} ({row.reason}): {row.cause.type}: {_first_line(row.cause.message)}"
        for row in batch.trajectories
        if row.cause is not None
    )
    listed = [f"{n:,} {text}" for text, n in counts.most_common(MAX_CAUSES)]
    more = len(counts) - len(listed)
    return listed + ([f"… and {count(more, 'other cause')}"] if more else [])


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _files(directory: Path, names: Sequence[str] | None) -> str:
    from rollout.batch.storage import FILES, JOURNAL, META
    from rollout.observe.event_file import EVENTS

    if names is None:
        beside = (each for each in (EVENTS, JOURNAL) if (directory / each).exists())
        names = (*FILES, META, *beside)
    return f"{directory}: {', '.join(names) or 'none'}"
