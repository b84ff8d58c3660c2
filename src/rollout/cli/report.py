"""`rollout report`: the page of a run, written once or as long as the run grows."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.cli.wrapping import print_line
from rollout.engine.model_files import load_decoder
from rollout.errors import ConfigError, RolloutError
from rollout.observe.event_file import EVENTS, read_events
from rollout.observe.events import RunStarted
from rollout.observe.report.report import RunReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    Decode = Callable[[Sequence[int]], str]


def write_reports(
    directory: str,
    output: Console,
    *,
    path: str | None = None,
    tokenizer: str | None = None,
    follow_s: float | None = None,
) -> None:
    """Write the page of a run, and say on standard output where it is and what it finds.

    Args:
        directory: Of the run.
        path: Of the page; None: ``report.html`` in the directory.
        tokenizer: Of which model; None: of the one that the run says.
        follow_s: Write it again every so many seconds, until the run has ended; None: once.

    Raises:
        ConfigError: The tokenizer that was asked for cannot be loaded.
        RolloutError: As `RunReport`.
    """
    report = RunReport(directory, _decode(Path(directory), tokenizer, output))
    page = report.write(path)
    print_line(output, f"{'report':<10}{page}")
    while follow_s is not None and report.is_growing:
        wait(follow_s)
        report.write(path)
    for finding in report.findings:
        print_line(output, f"{finding.severity:<10}{finding.title}")
    if not report.findings:
        print_line(output, f"{'findings':<10}none")


def wait(seconds: float) -> None:
    """Let some seconds pass."""
    threading.Event().wait(seconds)


def _decode(directory: Path, tokenizer: str | None, output: Console) -> Decode | None:
    """Ids to text, of the tokenizer that was named, or of the run's where that is at hand."""
    if tokenizer is not None:
        try:
            return load_decoder(tokenizer)
        except RolloutError as error:
            raise ConfigError(f"--tokenizer {tokenizer}: {error}") from error
    model = _model_of(directory)
    path = model.get("path")
    if not isinstance(path, str):
        return None
    try:
        return load_decoder(path, model.get("revision"))
    except RolloutError as error:
        print_line(output, f"{'tokens':<10}shown as ids: {error}")
        return None


def _model_of(directory: Path) -> dict[str, Any]:
    """The section `model` of the run's configuration, or what its saved batch says of it."""
    if not os.path.exists(directory / EVENTS):
        from rollout.batch.storage import read_tokenizer  # imports torch

        tokenizer = read_tokenizer(directory)
        if tokenizer is None:
            return {}
        return {"path": tokenizer.path, "revision": tokenizer.revision}
    runs = [event for event in read_events(directory) if isinstance(event, RunStarted)]
    model = runs[-1].config.get("model") if runs else None
    return model if isinstance(model, dict) else {}
