"""The journal of a runtime: opened with it, and resumed from."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from rollout.errors import ConfigError, JournalError, PromptError
from rollout.scheduling.journal.entries import (
    Entry,
    Key,
    PromptEntry,
    VersionEntry,
    decode,
)
from rollout.scheduling.journal.journal_file import JournalFile, sync_names
from rollout.scheduling.journal.journal_writer import GATHER_S, MAX_WAITING, JournalWriter
from rollout.scheduling.journal.open_journal import CHECK_S, OpenJournal
from rollout.scheduling.journal.packed_prompt import packed_prompt
from rollout.scheduling.journal.pulled_before import content_of
from rollout.scheduling.journal.run_identity import check_same, header_of, say_other_tools
from rollout.scheduling.journal.trajectory_log import NOTHING, TrajectoryLog
from rollout.scopes import open_task_group
from rollout.worker_threads import may_leave_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from rollout.agents.services import Services
    from rollout.config import JournalConfig
    from rollout.scheduling.journal.journal_reading import (
        Contents,
        Payload,
        PromptKey,
    )
    from rollout.scheduling.member_group import Member
    from rollout.types import Prompt

#: How long what waits at the end of a runtime is tried to be written.
_CLOSE_S = 10.0
#: Steps whose uids are remembered, to tell calls with the same ones apart. Of others it is known
#: how often they were most: what they are asked for again is numbered from there.
_STEPS = 64
#: Of a prompt that its caller gives again when the call is made again. One that was pulled comes
#: back from the journal: rewards and tools would get the texts.
WRITTEN_AS_TEXT = ("extra", "ground_truth", "tools_kwargs")


class _Calls(dict[str, int]):
    """How many calls of a step had each uid; of one that is not there as many as `least`.

    Attributes:
        lock: Held while a call takes its numbers: calls of one step may be made in several threads.
        ahead: Numbers that were taken before the ones below them; see `Journal._number`.
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least = least
        self.lock = threading.Lock()
        self.ahead: set[tuple[str, int]] = set()

    def __missing__(self, _uid: str) -> int:
        return self._least

    @property
    def most(self) -> int:
        """Of any uid."""
        return max([*self.values(), *(call + 1 for _, call in self.ahead)], default=self._least)

    def take(self, uid: str, call: int) -> None:
        """Have no other call take this number."""
        if any((uid, below) not in self.ahead for below in range(self[uid], call)):
            self.ahead.add((uid, call))
        else:
            self[uid] = call + 1


class Journal(OpenJournal):
    """Writes what comes of a run, and knows what there is from before."""

    def __init__(
        self,
        config: JournalConfig,
        contents: Contents,
        writer: JournalWriter,
        read: Callable[[Payload], Entry],
        services: Services,
    ) -> None:
        super().__init__(config, writer, read, services, contents.media)
        self._contents = contents
        self._calls: OrderedDict[tuple[int, bool], _Calls] = OrderedDict()
        self._most_calls: dict[tuple[int, bool], int] = {}
        self._is_counting = threading.Lock()
        self._announced = contents.version
        if contents.version is None:
            self.note_version(services.engines.info.weight_version)

    def pulled_before(self) -> Iterator[PromptEntry]:
        """Prompts of calls of groups, in the order in which they were first begun."""
        for entry in map(self.read, self._contents.prompts.values()):
            if isinstance(entry, PromptEntry) and entry.pulled is not None:
                yield entry

    def prompt_before(self, entry: PromptEntry) -> PromptEntry:
        """The whole record of a prompt of which some is known."""
        found = self.read(self._contents.prompts[_prompt_key(entry)])
        assert isinstance(found, PromptEntry)
        return found

    def delivery_of(self, step: int, uid: str, call: int) -> int | None:
        """The step of the call that gave members of a group to its caller; None: none did."""
        return self._contents.deliveries().get((step, uid, call))

    def given_at(self, step: int, uid: str, call: int) -> tuple[int, int]:
        """What sorts a group among those that were given to their callers."""
        return self._contents.given_at.get((step, uid, call), (0, 0))

    def oldest_version(self, step: int, uid: str, call: int) -> int | None:
        """Of the weights that sampled for a group; None: none did."""
        return self._contents.oldest().get((step, uid, call))

    @property
    def ended_sources(self) -> Mapping[int, int | None]:
        """See `Contents`."""
        return self._contents.ended_sources

    @property
    def missing(self) -> Mapping[int, int]:
        """See `Contents`."""
        return self._contents.missing

    def enrol(
        self, members: Sequence[Member], known_call: int | None = None, *, is_pulled: bool = False
    ) -> list[PromptEntry]:
        """Give each member its log; prompts to be written. In any thread.

        Args:
            members: Of one call.
            known_call: The number of that call, where it is an earlier one.
            is_pulled: Whether they are of a group that was pulled.

        Raises:
            PromptError: A prompt holds what cannot be written, or is another one than before.
        """
        entries: dict[str, PromptEntry] = {}
        places: dict[str, str] = {}
        faults: list[str] = []
        if not members:
            return []
        identity = members[0].identity
        step, validate = identity.step, identity.validate
        before, known = self._calls_before(step, validate), self._contents.prompts
        for member in members:
            identity = member.identity
            uid = identity.uid
            if uid not in entries:
                where = f"prompts[{identity.group}]"
                fields = self._fields(member.named_prompt, where, faults)
                entries[uid] = PromptEntry(step, uid, validate, known_call or 0, fields)
                places[uid] = where
        with before.lock:
            for uid, entry in entries.items():
                if known_call is None:
                    entry.call = self._number(entry, before, is_pulled=is_pulled)
                if known:
                    faults += self._changes(entry, places[uid])
            if faults:
                raise PromptError("\n".join(faults))
            if known_call is None:
                for uid, entry in entries.items():
                    before.take(uid, entry.call)
        recorded, writer = self._contents.trajectories, self.writer
        for member in members:
            identity = member.identity
            uid = identity.uid
            key = Key(step, uid, identity.member, validate, entries[uid].call)
            found = recorded.pop(key, NOTHING) if recorded else NOTHING
            member.log = TrajectoryLog(key, self, writer, found, found.start)
        return [each for each in entries.values() if not known or _prompt_key(each) not in known]

    def _number(self, entry: PromptEntry, before: _Calls, *, is_pulled: bool) -> int:
        """The number of a prompt's call among those of its step that have its uid.

        The first that is not taken. A call that is made again finds its prompt under the number
        that it had: calls that were made at once may begin in another order than before, so where
        the prompt of the first number is another one, an equal one counts.

        Numbers that an earlier process gave to prompts that were pulled are passed over: a group
        that is continued brings its number with it, and any other one begins again.
        """
        mine = msgspec.structs.replace(entry)
        another: int | None = None
        for mine.call in count(before[entry.uid]):
            if (entry.uid, mine.call) in before.ahead:
                continue
            known = self._contents.prompts.get(_prompt_key(mine))
            if known is None:
                break
            recorded = self.read(known)
            assert isinstance(recorded, PromptEntry)
            if is_pulled or recorded.pulled is not None:
                continue
            if not self._changes(mine, ""):
                return mine.call
            if another is None:
                another = mine.call
        return mine.call if another is None else another

    def _fields(self, prompt: Prompt, where: str, faults: list[str]) -> bytes:
        try:
            return packed_prompt(prompt, where, self.unwritable, WRITTEN_AS_TEXT)
        except (JournalError, TypeError, ValueError) as error:
            faults.append(f"{error} (journal.path is set)")
            return b""

    def _changes(self, entry: PromptEntry, where: str) -> list[str]:
        """How a prompt differs from the one that the journal has in its place."""
        known = self._contents.prompts.get(_prompt_key(entry))
        if known is None or not entry.fields:
            return []
        before = self.read(known)
        assert isinstance(before, PromptEntry)
        if before.fields == entry.fields:
            return []
        old, new = content_of(before.fields), content_of(entry.fields)
        names = [name for name in new if old.get(name) != new[name]]
        return names and [
            f"{where} (uid {entry.uid!r}): is not the prompt of the journal {self._config.path}; "
            f"differs in {', '.join(names)}"
        ]

    def _calls_before(self, step: int, validate: bool) -> _Calls:
        """How many calls of a step had each uid so far."""
        key = step, validate
        with self._is_counting:
            counted = self._calls.pop(key, None)
            if counted is None:
                counted = _Calls(self._most_calls.get(key, 0))
            self._calls[key] = counted  # the last of them
            if len(self._calls) > _STEPS:
                old, calls = self._calls.popitem(last=False)
                self._most_calls[old] = calls.most
            return counted

    def check_announced(self) -> None:
        """Let calls pass once the version of the weights is known.

        Raises:
            ConfigError: The journal's last one is not that of the engines, and nobody has said
                which they have.
        """
        version = self._services.engines.info.weight_version
        if self._announced is None or self._announced == version:
            return
        raise ConfigError(
            f"journal.path = {self._config.path!r}: its last tokens are of weights of version "
            f"{self._announced}, the engines have version {version}; announce the weights to "
            f"continue with: update_weights(version={self._announced}, source=...)"
        )

    def note_version(self, version: int) -> None:
        """The engines have weights of this version now."""
        self._announced = None
        self.put(VersionEntry(version))


def _prompt_key(entry: PromptEntry) -> PromptKey:
    return entry.step, entry.uid, entry.validate, entry.call


@asynccontextmanager
async def open_journal(
    services: Services, file: JournalFile | None, fingerprint: str, run_seed: int
) -> AsyncIterator[Journal | None]:
    """The journal of the services' configuration, open for writing; None where it has none.

    Raises:
        ConfigError: It is of another model, or cannot be written.
    """
    config = services.config
    if file is None or config.journal.path is None:
        yield None
        return
    path, contents = file.path, file.contents
    schemas, info = services.tools.schemas(), services.engines.info
    files = {
        "fingerprint": fingerprint,
        "vocabulary and chat template": services.template.fingerprint,
    }
    header = header_of(config, files, schemas, run_seed, info)
    check_same(config.journal.path, contents, header)
    say_other_tools(config.journal.path, contents, header)
    descriptor = file.taken()
    fsync = config.journal.fsync
    waits = fsync == "always"
    if fsync != "never" and contents.header is None:
        sync_names(path)
    writer = JournalWriter(
        path,
        descriptor,
        contents.size,
        syncs=fsync != "never",
        gather_s=0.0 if waits else GATHER_S,
        allowance=0 if waits else MAX_WAITING,
    )
    if contents.header is None:
        writer.put(header)

    def read(payload: Payload) -> Entry:
        return decode(os.pread(descriptor, payload.size, payload.start))

    async with open_task_group() as tasks:
        if may_leave_loop():
            tasks.start_soon(writer.watch, CHECK_S)
        try:
            yield Journal(config.journal, contents, writer, read, services)
        finally:
            await writer.close(_CLOSE_S)
