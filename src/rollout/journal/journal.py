"""The journal of a runtime: locked and read before any work, written until the end."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.chat.plain_data import NotPlainError, encoder, to_plain
from rollout.config import dump_config
from rollout.errors import ConfigError, JournalError
from rollout.journal.index import JournalIndex, read_journal
from rollout.journal.log_file import LogFile, find_path_fault, logger
from rollout.journal.records import Header, MediumRecord, VersionRecord
from rollout.journal.values import ValueWriter
from rollout.seeds import fresh_seed
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from rollout.agents.services import Services
    from rollout.config import RolloutConfig


#: Keys that say where and how fast a run is worked on, and not what comes of it.
MAY_CHANGE = (
    "journal",
    "observe",
    "placement",
    "router",
    "channel",
    "recovery",
    *(f"gateway.{name}" for name in ("host", "port", "public_url", "max_connections")),
    *(f"gateway.{name}_s" for name in ("keep_alive", "head", "body", "write", "idle")),
    "engine.replicas",
    "scheduling.max_in_flight",
    "scheduling.adaptive_admission",
    "scheduling.freeze_heap",
)
#: Differences that an error names.
_NAMED = 5


@attrs.frozen(kw_only=True)
class JournalStatistics:
    """A journal now, and what became of what it held.

    Attributes:
        returned: Finished trajectories that were returned from it.
        continued: Unfinished ones that continued from their last turn.
        restarted: Unfinished ones that began again, since the state of a tool is lost.
        departed: Of the continued ones those that asked otherwise than before.
        recalled: Turns, and tool results of turns, that were reused.
        records, bytes: Written since the runtime was opened; size of the file.
        waiting: Records that are not written yet.
        failure: Why the last attempt to write failed; "" where it did not.
    """

    returned: int = 0
    continued: int = 0
    restarted: int = 0
    departed: int = 0
    recalled: int = 0
    records: int
    bytes: int
    waiting: int
    failure: str


class Journal:
    """A journal that is locked and indexed; `writing` begins it, or goes on with it.

    Attributes:
        file: Writes records, to `path`.
        index: What there is from before.
        counts: What became of that; see `JournalStatistics`.
        services: What trajectories share, once it is written.
        values: Makes plain data of values.
        warn_once: Logs a warning, unless the same was logged before.
        waits: Whether a trajectory waits after each record until it is on the disk.
    """

    def __init__(self, config: RolloutConfig, file: LogFile, index: JournalIndex) -> None:
        self.file, self.index, self.counts = file, index, Counter[str]()
        self._config, self.path = config, str(config.journal.path)
        self.values = ValueWriter(as_text=config.journal.unwritable == "text")
        self.waits = config.journal.fsync == "always"
        self._written_media = set(index.media)
        self._announced: int | None = None
        self.warn_once = lru_cache(100)(logger.warning)
        self.services: Services

    @asynccontextmanager
    async def writing(
        self, services: Services, fingerprint: str, run_seed: int
    ) -> AsyncIterator[None]:
        """Write what is put during the block.

        Args:
            fingerprint: Of the model.

        Raises:
            ConfigError: It is of another model.
        """
        self.services, section = services, self._config.journal
        syncs, template = section.fsync != "never", services.template.fingerprint
        header = Header(
            run_seed=run_seed,
            config=dump_config(self._config),
            files={"fingerprint": fingerprint, "vocabulary and chat template": template},
            schemas=[dict(schema) for schema in services.tools.schemas()],
            engine=msgspec.to_builtins(services.engines.info),
        )
        _check_header(self.path, self.index.header, header)
        self.index.warn_of_tail("cut off")
        self.file.size = self.index.size
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

    def check_announced(self) -> None:
        """Check that it is known which weights the engines of a resumed run have.

        Raises:
            ConfigError: The journal's last tokens are of other ones, and nobody has announced them.
        """
        version = self.services.engines.info.weight_version
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
            **self.counts,
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
        if index.header is not None:
            configs = index.header.config, dump_config(config)
            _refuse_differences(str(config.journal.path), *map(_list_lasting, configs))
        yield Journal(config, file, index)
    finally:
        with suppress(OSError):
            if is_new and not path.stat().st_size:  # nothing has begun it
                path.resolve().unlink()
        file.close()


# Whether a run is the one that a journal is of.


def _check_header(path: str, old: Header | None, new: Header) -> None:
    """Check that a run has the model's files of a journal, or can begin one; warn of other tools.

    Raises:
        ConfigError: The files are others, or no journal can hold this run; names what and where.
    """
    if old is not None:
        _refuse_differences(path, old.files, new.files)
        schemas = msgspec.msgpack.decode(encoder.encode(new.schemas))  # as a journal gives them
        before, now = ({_get_name(each): each for each in s} for s in (old.schemas, schemas))
        changes = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
        if changes:
            what = f"these tools have other schemas than before: {', '.join(changes)}"
            keep = "finished trajectories keep the answers that they had"
            logger.warning("%s: %s; %s, others may ask otherwise and continue", path, what, keep)
        return
    faults = []
    values = {f"the schema of tool {_get_name(each)!r}": each for each in new.schemas}
    for where, value in (values | _flatten(new.config)).items():
        try:
            to_plain(value, where)
        except NotPlainError as error:
            faults.append(str(error))
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise ConfigError(f"journal.path = {path!r}: cannot hold this run:{lines}", (*faults,))


def _get_name(schema: dict[str, Any]) -> str:
    return str(schema["function"]["name"])


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a dumped configuration by path, `section.key`."""
    if not (isinstance(value, dict) and value):
        return {path: value}
    flat: dict[str, Any] = {}
    for key, each in value.items():
        flat |= _flatten(each, f"{path}.{key}" if path else key)
    return flat


def _list_lasting(dumped: dict[str, Any]) -> dict[str, Any]:
    """Return the values that may not change from run to run, by path."""
    may_change = tuple(f"{key}." for key in MAY_CHANGE)
    return {
        key: value
        for key, value in _flatten(dumped).items()
        if key == "journal.prompts" or not f"{key}.".startswith(may_change)
    }


def _refuse_differences(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    found = []
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            there, here = (f"{of[key]!r:.200}" if key in of else "nothing" for of in (old, new))
            found.append(f"{key} = {there} there, {here} here")
    if found:
        more = f"\n  and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        lines = "".join(f"\n  {line}" for line in found[:_NAMED])
        raise ConfigError(
            f"journal.path = {path!r}: is the journal of another run; expected the same, or "
            f"another journal:{lines}{more}",
            tuple(found),
        )
