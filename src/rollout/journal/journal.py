"""The journal of a runtime: locked and read before any work, written until the end."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import attrs

from rollout.errors import ConfigError, JournalError
from rollout.journal.index import JournalIndex, read_journal
from rollout.journal.log_file import LogFile, find_path_fault, logger
from rollout.journal.records import MediumRecord, VersionRecord
from rollout.journal.run_header import check_config, check_header, make_header
from rollout.journal.values import ValueWriter
from rollout.seeds import fresh_seed
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from rollout.agents.services import Services
    from rollout.config import RolloutConfig


@attrs.define
class JournalCounts:
    """What became of what a journal held.

    Attributes:
        returned: Finished trajectories that were returned from it.
        continued: Unfinished ones that continued from their last turn.
        restarted: Unfinished ones that began again, since the state of a tool is lost.
        departed: Of the continued ones those that asked otherwise than before.
        recalled: Turns, and tool results of turns, that were given again.
    """

    returned: int = 0
    continued: int = 0
    restarted: int = 0
    departed: int = 0
    recalled: int = 0


@attrs.frozen(kw_only=True)
class JournalStatistics(JournalCounts):
    """A journal now.

    Attributes:
        records, bytes: Written since the runtime was opened; size of the file.
        waiting: Records that are not written yet.
        failure: Why the last attempt to write failed; "" where it did not.
    """

    records: int
    bytes: int
    waiting: int
    failure: str


class Journal:
    """A journal that is locked and indexed; `writing` begins it, or goes on with it.

    Attributes:
        file: Writes records.
        index: What there is from before.
        counts: What became of that.
        values: Makes plain data of values.
        waits: Whether a trajectory waits after each record until it is on the disk.
    """

    def __init__(self, config: RolloutConfig, file: LogFile, index: JournalIndex) -> None:
        self.file, self.index, self.counts = file, index, JournalCounts()
        self._config, self.path = config, str(config.journal.path)
        self.values = ValueWriter(as_text=config.journal.unwritable == "text")
        self.waits = config.journal.fsync == "always"
        self._written_media = set(index.media)
        self._announced: int | None = None
        self._has_warned = False
        self._services: Services

    @asynccontextmanager
    async def writing(
        self, services: Services, fingerprint: str, run_seed: int
    ) -> AsyncIterator[None]:
        """Write what is put during the block.

        Args:
            fingerprint: Of the model.

        Raises:
            ConfigError: It is of another model, or cannot be written.
        """
        self._services, section = services, self._config.journal
        header, syncs = make_header(run_seed, services, fingerprint), section.fsync != "never"
        check_header(self.path, self.index.header, header)
        self.index.warn_of_tail("cut off")
        try:
            self.file.cut(self.index.size, syncs=syncs)
        except OSError as error:
            raise ConfigError(
                f"journal.path = {self.path!r}: cannot be written: {error.strerror}"
            ) from error
        if self.index.header is None:
            self.file.put(header)
        self._announced = self.index.version
        if self._announced is None:
            self.note_version(services.engines.info.weight_version)
        may_continue = section.on_failure == "continue"
        async with self.file.writing(syncs=syncs, may_continue=may_continue):
            yield

    def put_media(self, contents: Mapping[str, bytes]) -> None:
        """Have these contents written, by digest, unless they are."""
        for digest in contents.keys() - self._written_media:
            self.file.put(MediumRecord(digest, contents[digest]))
            self._written_media.add(digest)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, by the tokenizer of the run."""
        return self._services.template.decode(ids)

    def warn_of_results(self, error: Exception) -> None:
        """Warn once that results of a tool are not written."""
        if not self._has_warned:
            self._has_warned = True
            what = "it is not in the journal, and a resumed trajectory calls the tool again"
            logger.warning("%s: %s", error, what)

    def check_announced(self) -> None:
        """Check that it is known which weights the engines of a resumed run have.

        Raises:
            ConfigError: The journal's last tokens are of other ones, and nobody has announced them.
        """
        version = self._services.engines.info.weight_version
        if self._announced in (None, version):
            return
        raise ConfigError(
            f"journal.path = {self.path!r}: its last tokens are of weights of version "
            f"{self._announced}, the engines have version {version}; announce the weights to "
            f"continue with: update_weights(version={self._announced}, source=...)"
        )

    def note_version(self, version: int) -> None:
        """Note that the engines have weights of this version now."""
        self._announced = None
        self.file.put(VersionRecord(version))

    def statistics(self) -> JournalStatistics:
        """Take a snapshot."""
        file = self.file
        return JournalStatistics(
            **attrs.asdict(self.counts),
            records=file.written,
            bytes=file.size,
            waiting=file.put_count - file.written,
            failure="" if file.failure is None else str(file.failure),
        )


def choose_run_seed(config: RolloutConfig, journal: Journal | None) -> int:
    """Choose what all seeds of a run derive from: the same again where it is resumed."""
    if journal is not None and journal.index.header is not None:
        return journal.index.header.run_seed
    return fresh_seed() if config.seed is None else config.seed


@asynccontextmanager
async def open_journal(config: RolloutConfig, *, resume: bool) -> AsyncIterator[Journal | None]:
    """Lock and index the journal of a configuration, before any work; None where it has none.

    Raises:
        ConfigError: It cannot be read or written, another runtime writes it, it is of another
            configuration, or there is one and it is not to be resumed.
    """
    if not isinstance(resume, bool):
        raise ConfigError(f"resume = {resume!r:.80}: expected True or False")
    path = config.journal.file
    if path is None:
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
        file = LogFile(path)
    except OSError as error:
        raise ConfigError(f"{named}: cannot be written: {error.strerror}") from error
    try:
        try:
            index = await run_in_thread(read_journal, path)
        except JournalError as error:
            raise ConfigError(f"{named}: {error}") from error
        check_config(str(config.journal.path), index.header, config)
        yield Journal(config, file, index)
    finally:
        with suppress(OSError):
            if is_new and not path.stat().st_size:  # nothing has begun it
                path.resolve().unlink()
        file.close()
