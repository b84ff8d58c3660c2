"""The journal that ``rollout run`` writes into its directory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from rollout.cli.aside import set_aside, settle
from rollout.errors import ConfigError, PromptError, RolloutError
from rollout.journal.log_file import lock_file
from rollout.observe.event_file import EVENTS

if TYPE_CHECKING:
    from rollout.config import RolloutConfig

#: As `rollout.batch.storage.JOURNAL`, which takes longer to import.
JOURNAL = "trajectories.journal"


def with_journal(
    config: RolloutConfig, directory: Path, prompts: Path | None = None, asked: str = ""
) -> RolloutConfig:
    """The configuration with a journal in the directory, unless it names one itself.

    Where the disk is full such a run continues, and what JSON could not hold is text: its results
    are saved as JSON in any case.

    Args:
        config: Of the run.
        directory: Of its results.
        prompts: Their file, or the directory of tasks.
        asked: As `asked_otherwise`; a resumption must agree.

    Raises:
        PromptError: The file of prompts cannot be read.
    """
    journal = config.journal
    if journal.path is None:
        path = str(directory / JOURNAL)
        journal = attrs.evolve(journal, path=path, on_failure="continue", unwritable="text")
    named = journal.prompts
    if named is None and prompts is not None:
        named = _named(prompts)
    if named is not None:
        journal = attrs.evolve(journal, prompts=named + asked)
    return attrs.evolve(config, journal=journal)


def asked_otherwise(
    config: RolloutConfig, samples: int | None, step: int | None, *, validate: bool
) -> str:
    """What the options of a command ask of a call that it would not do without them, in words."""
    asked = [f", --step {step}"] if step else []
    asked += [", --validate"] if validate else []
    if samples not in (None, config.scheduling.samples_of(validate=validate)):
        asked.append(f", --samples {samples}")
    return "".join(asked)


def _named(prompts: Path) -> str:
    try:
        if os.path.isdir(prompts):
            from rollout.environments.task_directory import hash_directory

            return f"{prompts.resolve().name}, SHA-256 {hash_directory(prompts)}"
        with prompts.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PromptError(f"{prompts} cannot be read: {error.strerror}") from error
    return f"{prompts.name}, SHA-256 {digest}"


def is_own(path: Path | None, directory: Path) -> bool:
    """Whether this is the journal that a run keeps in its directory, however it is spelt."""
    return path is not None and os.path.realpath(path) == os.path.realpath(directory / JOURNAL)


def check_journal(config: RolloutConfig, directory: Path, *, resume: bool) -> None:
    """Let a run pass that may write its journal: an earlier one in its directory is overwritten.

    Raises:
        ConfigError: There is one elsewhere and it is not to be resumed; or the run writes another
            file in its place.
    """
    path = config.journal.file
    if is_own(path, directory) or path is None:
        return
    place = Path(os.path.realpath(path))
    events = Path(os.path.realpath(Path(config.observe.path or directory, EVENTS)))
    if place.parent == Path(os.path.realpath(directory)) or place == events:
        from rollout.batch.storage import FILES, MEDIA, META  # imports torch
        from rollout.observe.report.report import REPORT
        from rollout.observe.timeline import TIMELINE

        if place == events or place.name in (META, *FILES, MEDIA, EVENTS, TIMELINE, REPORT):
            raise ConfigError(
                f"journal.path = {config.journal.path!r}: the run's {place.name} is written there; "
                "expected another file"
            )
    if not resume and path.exists() and path.stat().st_size:
        raise ConfigError(
            f"journal.path = {config.journal.path!r}: exists; expected a new file, or --resume to "
            f"continue the run that left it"
        )


def set_journal_aside(config: RolloutConfig, directory: Path, *, resume: bool) -> None:
    """Have the journal of an earlier run, which is to be overwritten, wait for this one's results.

    Raises:
        ConfigError: Another run writes it, whether it is to be overwritten or continued; or it
            cannot be opened.
    """
    path = config.journal.file
    if path is None or not os.path.isfile(path):
        return
    try:
        with path.open("rb+") as file:
            lock_file(file.fileno(), path)
            if not resume and is_own(path, directory):
                set_aside(directory / JOURNAL)
    except OSError as error:
        why = f"cannot be opened: {error.strerror}"
        raise ConfigError(f"journal.path = {str(path)!r}: {why}") from error


def remove_earlier_batch(directory: Path) -> None:
    """Remove the files of an earlier batch, which are no longer true."""
    from rollout.batch.storage import FILES, META  # with torch, imported by then

    for name in (META, *FILES):
        (directory / name).unlink(missing_ok=True)
    settle(directory / JOURNAL, has_results=True)


def ended_in(config: RolloutConfig) -> int:
    """Trajectories that the journal of a run has finished."""
    from rollout.journal.index import read_journal

    path = config.journal.file
    if path is None:
        return 0
    try:
        recorded = read_journal(path).trajectories.values()
    except RolloutError:
        return 0
    return sum(each.end is not None for each in recorded)
