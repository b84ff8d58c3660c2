"""Opens the journal of a runtime: locked and read before any work, written until the end."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import attrs

from rollout.errors import ConfigError, JournalError
from rollout.journal.index import JournalIndex, read_journal
from rollout.journal.journal import Journal
from rollout.journal.log_file import LogFile, find_path_fault
from rollout.journal.run_header import check_header, make_header, warn_of_other_tools
from rollout.journal.writer import JournalWriter
from rollout.scopes import open_task_group
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.agents.services import Services
    from rollout.config import RolloutConfig

#: How long the end of a runtime waits for what is not written yet.
_CLOSE_S = 10.0


@attrs.frozen
class JournalFile:
    """A journal that is locked and indexed, and not written yet.

    Attributes:
        log: The file.
        index: What it holds.
    """

    log: LogFile
    index: JournalIndex


@asynccontextmanager
async def open_journal_file(
    config: RolloutConfig, *, resume: bool
) -> AsyncIterator[JournalFile | None]:
    """Lock and index the journal of a configuration, before any work; None where it has none.

    Raises:
        ConfigError: It cannot be read or written, another runtime writes it, it is of another
            configuration, or there is one and it is not to be resumed.
    """
    if not isinstance(resume, bool):
        raise ConfigError(f"resume = {resume!r:.80}: expected True or False")
    path = config.journal.file
    if config.journal.path is None or path is None:
        if resume:
            raise ConfigError("resume = True: expected journal.path to name the journal")
        yield None
        return
    fault = find_path_fault(path)
    if fault is not None:
        raise ConfigError(fault)
    named, is_new = f"journal.path = {str(path)!r}", not path.exists()
    if not resume and not is_new and path.stat().st_size:
        raise ConfigError(f"{named}: exists; expected a new file, or resume=True")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = LogFile(path)
    except OSError as error:
        raise ConfigError(f"{named}: cannot be written: {error.strerror}") from error
    try:
        try:
            index = await run_in_thread(read_journal, path)
        except JournalError as error:
            raise ConfigError(f"{named}: {error}") from error
        # What the model's files hold is compared later, once it is loaded.
        check_header(config.journal.path, index.header, make_header(config, {}, [], 0))
        yield JournalFile(log, index)
    finally:
        with suppress(OSError):
            if is_new and not path.stat().st_size:  # nothing has begun it
                path.resolve().unlink()
        log.close()


@asynccontextmanager
async def open_journal(
    services: Services, file: JournalFile | None, fingerprint: str, run_seed: int
) -> AsyncIterator[Journal | None]:
    """Open a journal for writing; None where the configuration has none.

    Args:
        file: From `open_journal_file`, which closes it.
        fingerprint: Of the model.

    Raises:
        ConfigError: It is of another model, or cannot be written.
    """
    config = services.config
    if file is None or config.journal.path is None:
        yield None
        return
    path, index, fsync = config.journal.path, file.index, config.journal.fsync
    files = {
        "fingerprint": fingerprint,
        "vocabulary and chat template": services.template.fingerprint,
    }
    header = make_header(config, files, services.tools.schemas(), run_seed, services.engines.info)
    check_header(path, index.header, header)
    warn_of_other_tools(path, index.header, header)
    index.warn_of_tail(file.log.path, "cut off")
    try:
        file.log.cut(index.size, syncs=fsync != "never")
    except OSError as error:
        raise ConfigError(
            f"journal.path = {path!r}: cannot be written: {error.strerror}"
        ) from error
    writer = JournalWriter(file.log, syncs=fsync != "never")
    if index.header is None:
        writer.put(header)
    async with open_task_group() as tasks:
        tasks.start_soon(writer.run)
        try:
            yield Journal(index, writer, services)
        finally:
            await writer.close(_CLOSE_S)
