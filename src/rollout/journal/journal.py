"""The journal of a runtime: opened with it, written by it, resumed from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from rollout.bridge import loop_clock
from rollout.errors import ConfigError, JournalError
from rollout.journal.index import JournalIndex, RecordedMedia
from rollout.journal.records import (
    DeliveredRecord,
    Key,
    MediumRecord,
    Record,
    Span,
    VersionRecord,
    decode_record,
)
from rollout.journal.values import Unwritable, logger
from rollout.media.records import KnownContents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rollout.agents.services import Services
    from rollout.journal.writer import JournalWriter


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
    """Writes what comes of a run, and knows what an earlier process wrote.

    Attributes:
        path: As the configuration has it.
        waits: Whether a trajectory waits after each record until it is on the disk.
        index: What there is from before.
        counts: What became of that.
        writer: Writes what is put.
        unwritable: What becomes of values that are no plain data.
        media: Gives images and videos of before their contents.
    """

    def __init__(self, index: JournalIndex, writer: JournalWriter, services: Services) -> None:
        self.index, self.writer, self.counts = index, writer, JournalCounts()
        self._file, self._config, self._services = writer.file, services.config.journal, services
        self.path, self.waits = self._config.path, self._config.fsync == "always"
        self.unwritable = Unwritable(is_text=self._config.unwritable == "text")
        recorded = RecordedMedia(self.index.media, self.read)
        self.media = KnownContents(recorded.get, str(self._file.path))
        self._written_media = set(self.index.media)
        self._has_warned = False
        self._clock = loop_clock()
        self._announced = self.index.version
        if self.index.version is None:
            self.note_version(services.engines.info.weight_version)

    def read(self, span: Span) -> Record:
        """Read a record of before; in any thread."""
        return decode_record(self._file.read(span))

    def put(self, record: Record) -> int:
        """Have a record written; return its number."""
        return self.writer.put(record)

    def put_media(self, contents: Mapping[str, bytes]) -> None:
        """Have these contents written, by digest, unless they are."""
        for digest in contents.keys() - self._written_media:
            self.put(MediumRecord(digest, contents[digest]))
            self._written_media.add(digest)

    def note_delivery(self, keys: Iterable[Key], step: int | None = None) -> int:
        """Note that a caller has these; return the number of that record, 0 where there are none.

        Args:
            step: Of the call that delivers groups; None: their own.
        """
        delivered = list(keys)
        return self.put(DeliveredRecord(delivered, step)) if delivered else 0

    # Waiting for the disk.

    @property
    def failure(self) -> JournalError | None:
        """Why it cannot be written at present."""
        if self.writer.failure is not None:
            return JournalError(str(self.writer.failure))
        if self.writer.is_closed:
            return JournalError("the runtime was closed, and its journal with it")
        return None

    def has_written(self, number: int) -> bool:
        """Whether a record is written, or `journal.on_failure` says not to wait for it."""
        writer = self.writer
        may_continue = writer.failure is not None and self._config.on_failure == "continue"
        return writer.written >= number or may_continue

    async def wait_written(
        self,
        number: int,
        deadline: float = math.inf,
        is_over: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until `has_written`; return whether it is.

        Args:
            number: Of a record.
            deadline: Up to when this waits for a disk that refuses it.
            is_over: Whether nobody wants what is waited for any more.
        """
        while not self.has_written(number):
            is_late = self.writer.failure is not None and self._clock() >= deadline
            if is_over() or is_late or self.writer.is_closed:
                await self.writer.wait(number)
                return self.has_written(number)
            await self.writer.wait(number)
        return True

    @property
    def decode(self) -> Callable[[Sequence[int]], str]:
        """Ids to text, by the tokenizer of the run."""
        return self._services.template.decode

    def warn_of_results(self, error: Exception) -> None:
        """Warn once that results of a tool are not written."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: it is not in the journal, and a resumed trajectory calls the tool again", error
            )

    # Weights.

    def check_announced(self) -> None:
        """Check that it is known which weights the engines of a resumed run have.

        Raises:
            ConfigError: The journal's last tokens are of other ones, and nobody has announced them.
        """
        version = self._services.engines.info.weight_version
        if self._announced is None or self._announced == version:
            return
        raise ConfigError(
            f"journal.path = {self.path!r}: its last tokens are of weights of version "
            f"{self._announced}, the engines have version {version}; announce the weights to "
            f"continue with: update_weights(version={self._announced}, source=...)"
        )

    def note_version(self, version: int) -> None:
        """Note that the engines have weights of this version now."""
        self._announced = None
        self.put(VersionRecord(version))

    def statistics(self) -> JournalStatistics:
        """Take a snapshot."""
        writer = self.writer
        return JournalStatistics(
            **attrs.asdict(self.counts),
            records=writer.written,
            bytes=self._file.size,
            waiting=writer.put_count - writer.written,
            failure="" if writer.failure is None else str(writer.failure),
        )
