"""The table of trajectories: one `Row` each, small enough to stand in the page as it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs

from rollout.types import DRIFT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rollout.observe.report.saved_trajectories import (
        SavedMessage,
        SavedSegment,
        SavedTrajectory,
    )

#: Characters of the question and of the last answer, by which the table is searched.
SHOWN = 140


@attrs.frozen(kw_only=True)
class Row:
    """What the table shows of a trajectory, and what findings are made of.

    Attributes:
        step: The trainer's; None where it is not known.
        validate: Whether it validates; None where it is not known.
        call: How many calls of this step had the same uid before, as far as it is known.
        reward: None where it is not known.
        seconds, generation_s, tool_s: None where they were not measured.
        drift: How its text compares with a full rendering; "" where that was not asked.
        limit: The limit that ended it.
        cause: What was raised, "Type: message"; the table has the beginning of it.
        tools: Names of the tools that it called, each once.
        task, answer: The beginnings of the last question and of the last answer.
    """

    uid: str
    step: int | None
    validate: bool | None
    call: int
    group: int
    member: int
    outcome: str
    reason: str
    trainable: bool
    reward: float | None
    turns: int
    prompt: int
    generated: int
    observed: int
    calls: int
    errors: int
    seconds: float | None
    generation_s: float | None
    tool_s: float | None
    finish: str
    versions: tuple[int, ...]
    drift: str
    resumes: int
    limit: str
    cause: str
    tools: tuple[str, ...]
    task: str
    answer: str

    @property
    def name(self) -> str:
        """As events and links have it."""
        return f"{self.uid}/{self.member}"

    @property
    def group_key(self) -> tuple[int | None, bool | None, int, int, str]:
        """Equal for the members of one group: uids recur from call to call."""
        return self.step, self.validate, self.call, self.group, self.uid


def row_of(trajectory: SavedTrajectory) -> Row:
    """The row of a trajectory."""
    segments = trajectory.rows
    spans = [span for row in segments for span in row.spans or ()]
    sizes = dict.fromkeys(("prompt", "generated", "observation"), 0)
    for span in spans:
        sizes[span.kind] = sizes.get(span.kind, 0) + len(span.ids)
    generated = [span for span in spans if span.kind == "generated"]
    said = trajectory.messages
    metric = trajectory.metric
    drifts = [name for name in trajectory.metrics if name.startswith(DRIFT)]
    return Row(
        uid=trajectory.uid,
        step=trajectory.asked_in,
        validate=trajectory.validate,
        call=trajectory.call,
        group=trajectory.group,
        member=trajectory.member,
        outcome=trajectory.outcome,
        reason=trajectory.reason,
        trainable=trajectory.trainable,
        reward=_finite(trajectory.reward),
        turns=len(generated),
        prompt=sizes["prompt"],
        generated=sizes["generated"],
        observed=sizes["observation"],
        calls=int(metric("tool_calls") or 0),
        errors=int(metric("tool_errors") or 0),
        seconds=_finite(metric("total_s")),
        generation_s=_finite(metric("generation_s")),
        tool_s=_finite(metric("tool_s")),
        finish=(generated[-1].finish_reason or "") if generated else "",
        versions=tuple(sorted({version for span in generated for version, _ in span.versions})),
        drift=drifts[0].removeprefix(DRIFT) if drifts else "",
        resumes=int(metric("resumes") or 0),
        limit=trajectory.limit_source or "",
        cause=_cause(trajectory),
        tools=tuple(dict.fromkeys(_called(segments))),
        task=_last(said, "user"),
        answer=_last(said, "assistant"),
    )


def _called(segments: Iterable[SavedSegment]) -> Iterable[str]:
    """Names of tools that were called, each as often as it was."""
    messages = (each for segment in segments for each in segment.messages or ())
    return (call.name for each in messages for call in each.tool_calls)


def _cause(trajectory: SavedTrajectory) -> str:
    cause = trajectory.cause or {}
    return f"{cause.get('type', '')}: {cause.get('message', '')}" if cause else ""


def shortened(text: str) -> str:
    """What was raised, as much of it as is shown."""
    return text if len(text) <= 2 * SHOWN else f"{text[: 2 * SHOWN - 1]}…"


def _finite(value: float | str | None) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None


def _last(messages: Sequence[SavedMessage], role: str) -> str:
    text = next((each.content for each in reversed(messages) if each.role == role), None) or ""
    text = " ".join(text[: 4 * SHOWN].split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def columns_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The rows as columns, numbers rounded to what people read."""
    names = [field.name for field in attrs.fields(Row)]
    columns = {name: _column(getattr(row, name) for row in rows) for name in names}
    return {**columns, "cause": [shortened(row.cause) for row in rows]}


def _column(values: Iterable[Any]) -> list[Any]:
    return [_rounded(value) if isinstance(value, float) else value for value in values]


def _rounded(value: float) -> float:
    """To four places, or significant digits: rewards may be as small as anybody likes."""
    return round(value, 4) if abs(value) >= 1 else float(f"{value:.4g}")
