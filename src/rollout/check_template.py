"""``rollout check-template``: what a model's chat template does, as a table for people."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rollout.assembly import SIMULATED_MODEL
from rollout.chat import load_chat_template
from rollout.chat.battery import SceneReport, play_battery
from rollout.chat.drift import DRIFT_KINDS
from rollout.chat.loading import with_template
from rollout.engine.model_files import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from rollout.chat import ChatTemplate

_LABEL_WIDTH = 12
#: Longest reason shown in a cell; the log has errors whole.
_REASON = 160


def check_template(
    model: str,
    console: Console,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> bool:
    """Print what the template does; returns whether it can be used append-only in every scene.

    Raises:
        TemplateError, EngineError: The tokenizer or template cannot be loaded.
    """
    template = _loaded(
        model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        chat_template_path=chat_template,
    )
    reports = list(play_battery(template))
    for label, text in _facts(model, template):
        line = f"{label:<{_LABEL_WIDTH}}{text}"
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(_table(reports))
    for line in _notes(reports):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return all(report.refusal is None for report in reports)


def _loaded(model: str, *, revision: str | None, **options: Any) -> ChatTemplate:
    if model == SIMULATED_MODEL:
        from rollout.testing import simulated_tokenizer

        return with_template(
            simulated_tokenizer(), chat_template_path=options["chat_template_path"]
        )
    is_local = Path(model).is_dir()  # a tokenizer's files are enough
    path = model if is_local else resolve_model(model, revision)
    return load_chat_template(path, revision=revision, **options)


def _facts(model: str, template: ChatTemplate) -> Iterator[tuple[str, str]]:
    names = [template.decode([token]) for token in template.stop_token_ids]
    yield "model", f"{model}, {template.vocab_size:,} ids"
    yield "turns end", f"with {' or '.join(names)}" if names else "with no token of their own"
    where = "inside <think>" if template.opens_reasoning else "outside any reasoning"
    yield "turns open", where
    yield "calls", ", ".join(template.dialect_notes) or "arguments as an object, any id"
    added = template.added_system_prompt
    yield "system", f"adds {_short(repr(added), 100)} by itself" if added else "adds none by itself"


def _table(reports: Sequence[SceneReport]) -> Table:
    table = Table(show_lines=True)
    for title in ("conversation", "append-only", "inserted behind a turn", "cut turn", "drift"):
        table.add_column(title, overflow="fold")
    for report in reports:
        table.add_row(*(Text(cell) for cell in _cells(report)))
    return table


def _cells(report: SceneReport) -> tuple[str, ...]:
    if report.refusal is not None:
        return report.name, f"no: {_short(report.refusal, _REASON)}", "", "", ""
    boundary = "" if report.boundary is None else repr(report.boundary)
    cut_end = repr(report.cut_end) if report.cut_end else ""
    if report.drift_refusal is not None:
        return report.name, "yes", boundary, cut_end, f"not compared: {report.drift_refusal}"
    assert report.drift is not None
    return report.name, "yes", boundary, cut_end, report.drift.kind


def _notes(reports: Sequence[SceneReport]) -> Iterator[str]:
    """For each kind of drift the conversations that show it, and the first difference."""
    drifting = [(report.name, report.drift) for report in reports if report.drift is not None]
    for kind in DRIFT_KINDS[1:]:
        found = [(name, drift) for name, drift in drifting if drift.kind == kind]
        if found:
            yield f"{', '.join(name for name, _ in found)}: {found[0][1]}"


def _short(text: str, longest: int) -> str:
    return textwrap.shorten(text, longest, placeholder=" …")
