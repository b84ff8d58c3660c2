"""The open journal, as the logs of trajectories use it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from rollout.agents.kept_messages import TurnReader
from rollout.bridge import loop_clock
from rollout.chat.media_records import KnownContents
from rollout.errors import JournalError, ToolError
from rollout.scheduling.journal.entries import DeliveredEntry, Entry, Key, MediumEntry
from rollout.scheduling.journal.journal_reading import RecordedMedia
from rollout.scheduling.journal.journal_writer import SOON_S
from rollout.scheduling.journal.plain_data import Unwritable, logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from rollout.agents.services import Services
    from rollout.config import JournalConfig
    from rollout.scheduling.journal.journal_reading import Payload
    from rollout.scheduling.journal.journal_writer import JournalWriter
    from rollout.types import Prompt

#: Between two looks at whether a call that waits for the disk is to end.
CHECK_S = 0.2


@attrs.define
class JournalCounts:
    """What became of what a journal held.

    Attributes:
        returned: Finished trajectories that were returned from it.
        continued: Unfinished ones that continued from their last whole turn.
        restarted: Unfinished ones that began again, for a tool whose state is lost.
        departed: Of the continued ones those that asked otherwise than before.
        recalled: Turns, and answers of tools to a turn, that were given again.
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


class OpenJournal:
    """Takes records, and reads those that there are.

    Attributes:
        counts: Of what was there.
        writer: Writes what is put.
        unwritable: What becomes of values that are no plain data.
        put: Has a record written; gives its number.
        together: What is put in its block is written as a whole, or not at all.
        read: A record of before.
        media: Gives images and videos of before their contents.
    """

    def __init__(
        self,
        config: JournalConfig,
        writer: JournalWriter,
        read: Callable[[Payload], Entry],
        services: Services,
        media: Mapping[str, Payload],
    ) -> None:
        self.counts = JournalCounts()
        self.unwritable = Unwritable(as_text=config.unwritable == "text")
        self.read = read
        self.media = KnownContents(RecordedMedia(media, read), str(config.path))
        self._written_media = set(media)
        self._config, self.writer, self._services = config, writer, services
        self._readers: dict[tuple[str, ...] | None, TurnReader] = {}
        self._said = False
        self._clock = loop_clock()
        self.put, self.together = writer.put, writer.together

    def put_all(self, entries: Iterable[Entry]) -> None:
        """Have these written."""
        for entry in entries:
            self.put(entry)

    def put_media(self, contents: Mapping[str, bytes]) -> None:
        """Have these contents written, by digest, unless they are."""
        for digest in contents.keys() - self._written_media:
            self.writer.put_large(MediumEntry(digest, contents[digest]))
            self._written_media.add(digest)

    @property
    def failure(self) -> JournalError | None:
        """Why it cannot be written at present."""
        failure = self.writer.failure
        if failure is None and self.writer.is_closed:
            return JournalError("the runtime was closed, and its journal with it")
        return None if failure is None else JournalError(str(failure))

    def statistics(self) -> JournalStatistics:
        """A snapshot."""
        writer = self.writer
        return JournalStatistics(
            **attrs.asdict(self.counts),
            records=writer.written,
            bytes=writer.size,
            waiting=writer.put_count - writer.written,
            failure="" if writer.failure is None else str(writer.failure),
        )

    async def room(self, ticket: int) -> None:
        """Until the record of this number is `admitted`."""
        writer = self.writer
        while writer.admitted < ticket and not self._goes_on:
            await writer.until_written(ticket - writer.allowance, CHECK_S)

    async def kept(self, ticket: int, deadline: float = math.inf) -> None:
        """Until a record is written, or need not be.

        Where the disk refuses it, not past this; nor once the journal is closed.
        """
        writer = self.writer
        while not (self.has_written(ticket) or writer.is_closed):
            if writer.failure is not None and self._clock() >= deadline:
                return
            await writer.until_written(ticket, CHECK_S, within_s=SOON_S)

    async def until_written(
        self, ticket: int, deadline: float, is_over: Callable[[], bool]
    ) -> bool:
        """Whether a record is written; see `TrajectoryLog.until_written`."""
        while not self.has_written(ticket):
            if is_over() or (self.writer.failure is not None and self._clock() >= deadline):
                await self.writer.until_written(ticket, CHECK_S)
                return self.writer.written >= ticket
            await self.writer.until_written(ticket, CHECK_S)
        return True

    def has_written(self, ticket: int) -> bool:
        """Whether a record is written, or need not be."""
        return self.writer.written >= ticket or self._goes_on

    @property
    def _goes_on(self) -> bool:
        return self.writer.failure is not None and self._config.on_failure == "continue"

    def delivered(self, keys: Iterable[Key], step: int | None = None) -> int:
        """The caller has these; see `DeliveredEntry`. The number of that record; 0: of none."""
        given = list(keys)
        return self.put(DeliveredEntry(given, step)) if given else 0

    def say_unwritable(self, error: Exception) -> None:
        """What a tool answered is not written; said once."""
        if not self._said:
            self._said = True
            logger.warning(
                "%s: it is not in the journal, and a resumed trajectory calls the tool again", error
            )

    def reader_for(
        self, prompt: Prompt | None
    ) -> Callable[[Sequence[Mapping[str, Any]] | None], TurnReader]:
        """Makes what the messages of a prompt's trajectories are read with."""
        own = self.reader_of(prompt)
        return lambda schemas: own if schemas is None else own._replace(schemas=schemas)

    def reader_of(self, prompt: Prompt | None) -> TurnReader:
        """Reads turns in which the tools that a prompt offers may be called."""
        names = None if prompt is None or prompt.tools is None else tuple(prompt.tools)
        reader = self._readers.get(names)
        if reader is None:
            services = self._services
            try:
                reader = services.reader_of(services.tools.names if names is None else names)
            except ToolError:  # a prompt that was rejected for its tools
                reader = TurnReader(services.template, services.parser, [])
            self._readers[names] = reader
        return reader
