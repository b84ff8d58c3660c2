"""``rollout check-template``: what a model's chat template does, as a table for people."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rollout.chat import ChatTemplate, load_chat_template
from rollout.chat.drift import DRIFT_KINDS, Drift
from rollout.chat.template_loading import read_template
from rollout.cli.template_conformance import SceneReport, conformance_reports
from rollout.cli.wrapping import column_widths, print_line, wrapped
from rollout.config.engines import SIMULATED_MODEL
from rollout.engine.model_files import resolve_model
from rollout.errors import EngineError, TemplateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

_LABEL_WIDTH = 12
_COLUMNS = ("conversation", "append-only", "inserted after a turn", "cut turn", "drift")
#: Of the columns after the first, short enough to stand beside their texts.
_BLOCK_LABELS = ("append-only", "inserted", "cut turn", "drift")
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
        TemplateError: The tokenizer or template cannot be loaded.
    """
    template = _loaded(
        model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        chat_template_path=chat_template,
    )
    reports = list(conformance_reports(template))
    for label, text in _facts(model, template):
        print_line(console, f"{label:<{_LABEL_WIDTH}}{text}")
    rows = [_cells(report) for report in reports]
    # A column has a line and a space on either side, and there is one more line.
    widths = column_widths([_COLUMNS, *rows], console.width - 3 * len(_COLUMNS) - 1)
    if widths is not None:
        console.print(_table(rows, widths))
    else:
        for row in rows:
            _print_block(console, row)
    for line in _notes(reports):
        print_line(console, line)
    return all(report.refusal is None for report in reports)


def _loaded(model: str, *, revision: str | None, **options: Any) -> ChatTemplate:
    if model == SIMULATED_MODEL:
        from rollout.engine.cores.simulated.vocabulary import simulated_tokenizer

        tokenizer = simulated_tokenizer()
        source = read_template(options["chat_template_path"], tokenizer)
        return ChatTemplate(tokenizer, chat_template=source)
    is_local = os.path.isdir(model)  # a tokenizer's files are enough
    try:
        path = model if is_local else resolve_model(model, revision)
    except EngineError as error:  # no engine is meant to start here
        raise TemplateError(str(error)) from error
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


def _table(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> Table:
    table = Table(show_lines=True)
    for title, width in zip(_COLUMNS, widths, strict=True):
        table.add_column(title, width=width)
    for row in rows:
        cells = (wrapped(cell, width) for cell, width in zip(row, widths, strict=True))
        table.add_row(*map(Text, cells))
    return table


def _print_block(console: Console, row: Sequence[str]) -> None:
    """What a row of the table says, below one another, for a console that is too narrow for it."""
    print_line(console, row[0])
    for label, text in zip(_BLOCK_LABELS, row[1:], strict=True):
        if text:
            print_line(console, f"- {label:<{_LABEL_WIDTH - 1}} {text}")


def _cells(report: SceneReport) -> tuple[str, ...]:
    if report.refusal is not None:
        return report.name, f"no: {_short(report.refusal, _REASON)}", "", "", ""
    boundary = "" if report.boundary is None else repr(report.boundary)
    cut_end = repr(report.cut_end) if report.cut_end else ""
    drift = report.drift
    kind = f"not compared: {drift}" if isinstance(drift, str) else drift.kind
    return report.name, "yes", boundary, cut_end, kind


def _notes(reports: Sequence[SceneReport]) -> Iterator[str]:
    """For each kind of drift the conversations that show it, and the first difference."""
    drifting = [
        (report.name, report.drift) for report in reports if isinstance(report.drift, Drift)
    ]
    for kind in DRIFT_KINDS[1:]:
        found = [(name, drift) for name, drift in drifting if drift.kind == kind]
        if found:
            yield f"{', '.join(name for name, _ in found)}: {found[0][1]}"


def _short(text: str, longest: int) -> str:
    return textwrap.shorten(text, longest, placeholder=" …")
