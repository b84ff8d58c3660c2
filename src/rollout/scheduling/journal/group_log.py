"""The journal of groups that are pulled: which there were, who got them, and what is left."""

from __future__ import annotations

from collections import deque
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from xxhash import xxh3_128_digest

from rollout.errors import JournalError, PromptError
from rollout.scheduling.journal.entries import (
    BEGUN_AGAIN,
    UNWANTED,
    PromptEntry,
    ReturnedShortEntry,
    SourceEndedEntry,
)
from rollout.scheduling.journal.packed_prompt import packed_prompt, prompt_of
from rollout.scheduling.journal.pulled_before import PulledBefore, content_of, name_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.scheduling.journal.journal import Journal
    from rollout.scheduling.journal.trajectory_log import TrajectoryLog
    from rollout.scheduling.member_group import Member, MemberGroup
    from rollout.scheduling.sources import PromptSource
    from rollout.types import Prompt

    #: The uid with which a prompt was pulled, and the sum of its other fields.
    _Pull = tuple[str, bytes]


class _Known(NamedTuple):
    """Of a `PulledBefore` what is small.

    Attributes:
        pull: As what its source gave it.
    """

    number: int
    entry: PromptEntry
    step: int | None
    pull: _Pull


class GroupLog:
    """What calls of groups tell a journal, and what it knows from before; nothing without one.

    A resumed run begins its sources again, or gives what they have left. So prompts that are pulled
    again, in any order, are known and left out, until the source gives one that the journal has
    not: what it has of them is given out by itself. Those of a source whose end was told are not,
    nor those of a list that an earlier step used up: who gives them again starts it over.

    Args:
        journal: None where there is none.
        has_group_reward: Whether a member is finished only with its group.

    Attributes:
        pulled: How many prompts an earlier process pulled.
    """

    def __init__(self, journal: Journal | None, *, has_group_reward: bool) -> None:
        self._journal = journal
        self._has_group_reward = has_group_reward
        #: The numbers of the sources that are expected to give it again.
        self._pulls: dict[_Pull, deque[int]] = {}
        #: Of lists that were pulled to their end the last step that had something of them.
        self._used_up: dict[int, int] = {}
        #: By the step of the call that gave them to its caller; None: none did.
        self._left: dict[int | None, list[_Known]] = {}
        self._ended_sources = {} if journal is None else dict(journal.ended_sources)
        self._missing = {} if journal is None else dict(journal.missing)
        self.pulled = self._sources = 0
        if journal is not None:
            self._read(journal.pulled_before())

    def _read(self, entries: Iterable[PromptEntry]) -> None:
        """Know what an earlier process pulled."""
        found = list(starmap(self._known, enumerate(entries)))
        pulled = [each for each in found if each.step != BEGUN_AGAIN]
        # Where another call had still some of them, it asks the source again up to its end.
        unused = {each.entry.source for each in pulled if each.step is None}
        over = {*self._ended_sources.values()} - unused
        for each in pulled:
            entry, step = each.entry, each.step
            self.pulled = max(self.pulled, each.number + 1)
            if entry.is_last or entry.source in self._used_up:
                self._used_up[entry.source] = max(entry.step, self._used_up.get(entry.source, 0))
            if entry.source not in over:
                self._pulls.setdefault(each.pull, deque()).append(entry.source)
            if step != UNWANTED:
                self._left.setdefault(step, []).append(each)
        self._sources = max((each.entry.source for each in found), default=0)

    def _known(self, at: int, entry: PromptEntry) -> _Known:
        """A prompt of the journal, without what is large in it: it is read again where wanted."""
        pull, step = _pull_of(entry.fields, entry.pulled or ""), self._step_of(entry)
        entry.fields = b""
        return _Known(at if entry.number < 0 else entry.number, entry, step, pull)

    def _step_of(self, entry: PromptEntry) -> int | None:
        assert self._journal is not None
        return self._journal.delivery_of(entry.step, entry.uid, entry.call)

    def _version_of(self, entry: PromptEntry) -> int | None:
        assert self._journal is not None
        return self._journal.oldest_version(entry.step, entry.uid, entry.call)

    def check_announced(self) -> None:
        """See `Journal.check_announced`."""
        if self._journal is not None:
            self._journal.check_announced()

    def has_ended(self, step: int) -> bool:
        """Whether a call of this step was told that its source had ended; said once."""
        if step not in self._ended_sources:
            return False
        del self._ended_sources[step]
        return True

    def missing_in(self, step: int) -> int | None:
        """Without how many groups a call of this step returned; None: it did not. Said once."""
        return self._missing.pop(step, None)

    def returns_short(self, step: int, missing: int) -> None:
        """The call of this step returns without so many groups."""
        if self._journal is not None:
            self._journal.put(ReturnedShortEntry(step, missing))

    def source_ended(self, source: PromptSource, step: int) -> None:
        """The caller of this step is told that its source has ended."""
        if self._journal is not None:
            self._journal.put(SourceEndedEntry(step, source.number))

    def given_in(self, step: int) -> list[PulledBefore]:
        """Those that a call of this step gave to its caller, in the order in which it did; once."""
        taken = [*map(self._whole, self._left.pop(step, ()))]
        if self._journal is None or not taken:
            return taken
        place = self._journal.given_at
        taken.sort(key=lambda each: place(each.entry.step, each.entry.uid, each.entry.call))
        numbers = sorted(each.number for each in taken)
        return [each._replace(row=at) for each, at in zip(taken, numbers, strict=True)]

    def expect_no_lists_before(self, step: int, kept: set[int | None]) -> None:
        """Lists that were used up in earlier steps than this do not come again: it has its own.

        Args:
            step: Of a call that begins.
            kept: Sources that something is left of, which a call is to get first.
        """
        left = {*kept, *(each.entry.source for each in self._left.get(None, ()))}
        gone = {source for source, last in self._used_up.items() if last < step} - left
        if gone:
            for pull, sources in self._pulls.items():
                self._pulls[pull] = deque(each for each in sources if each not in gone)
            for source in gone:
                del self._used_up[source]

    def given_in_none(self, names: set[str]) -> list[PulledBefore]:
        """Those that no call did; once.

        Of several that have the same name the first, and none that has one of these: they are
        left for a later call, since none gets a name twice.
        """
        first: dict[str, _Known] = {}
        for each in self._left.get(None, ()):
            if each.entry.uid not in names:
                first.setdefault(each.entry.uid, each)
        if first:
            numbers = {each.number for each in first.values()}
            self._left[None] = [each for each in self._left[None] if each.number not in numbers]
        return [*map(self._whole, first.values())]

    def _whole(self, known: _Known) -> PulledBefore:
        number, entry, step, _ = known
        assert self._journal is not None
        prompt = prompt_of(self._journal.prompt_before(entry).fields)
        version = self._version_of(entry) if step is None else None
        return PulledBefore(number, prompt, entry, step, version)

    def is_repeated(self, given: Prompt, source: PromptSource, place: int) -> bool:
        """Whether a source gives again what an earlier process pulled.

        Args:
            given: What it gave.
            source: It; the number is put in that it has in the journal.
            place: How many it gave before.

        Raises:
            PromptError: The prompt holds what cannot be written.
        """
        if self._journal is None:
            return False
        uid = name_at(given, place)
        try:
            named, where = msgspec.structs.replace(given, uid=uid), f"source: prompt {place}"
            fields = packed_prompt(named, where, self._journal.unwritable, ("extra",))
        except (JournalError, TypeError, ValueError, OverflowError) as error:
            raise PromptError(f"{error} (journal.path is set)") from error
        expected = None if source.is_beyond else self._pulls.get(_pull_of(fields, uid))
        if expected:
            number = expected.popleft()
            if source.number is None:
                source.number = number
            return True
        source.is_beyond = True
        if source.number is None:
            self._sources += 1
            source.number = self._sources
        return False

    def enrol(self, group: MemberGroup) -> None:
        """Give the members of a group, all of which wait, their logs."""
        if self._journal is None:
            return
        call = None if group.before is None else group.before.entry.call
        with self._journal.together():
            for entry in self._journal.enrol(group.waiting, call, is_pulled=True):
                entry.pulled, entry.source = group.pulled, group.source.number or 0
                entry.is_last, entry.number = group.source.is_used_up, group.number
                self._journal.put(entry)
            if group.key is not None:
                self._journal.delivered([group.key], BEGUN_AGAIN)
        assert group.waiting[0].log is not None
        group.key = group.waiting[0].log.key
        if group.before is not None:  # what a caller had, and what is finished, counts first
            group.waiting.sort(key=_rank)

    def recorded(self, member: Member) -> Trajectory | None:
        """The trajectory, where the journal has it whole."""
        if member.log is None or member.is_carried:
            return None
        return member.log.finished(member.prompt, member.identity.group)

    def ended(self, member: Member, trajectory: Trajectory) -> None:
        """A member has its outcome, but for the reward of its group."""
        if member.log is not None and not self._has_group_reward and not member.log.is_finished:
            member.log.end(trajectory)

    def is_rewarded(self, ended: Sequence[Any]) -> bool:
        """Whether the journal has the rewards of these members of a group."""
        return all(log.is_finished for log in _logs(ended)) and self._journal is not None

    def rewarded(self, ended: Sequence[Any]) -> None:
        """The members of a group that have ended have all their rewards."""
        if self._journal is None or not self._has_group_reward:
            return
        with self._journal.together():
            for _, member, trajectory in ended:
                if not (member.log.is_finished or member.log.is_ended):  # for an earlier call
                    member.log.end(trajectory)

    async def until_written(
        self, ended: Sequence[Any], deadline: float, is_over: Callable[[], bool]
    ) -> JournalError | None:
        """Wait for the ends of these members; why they cannot be written, if they cannot."""
        for log in _logs(ended):
            if not await log.until_written(deadline, is_over):
                return log.failure
        return None

    def delivered(self, ended: Sequence[Any], step: int) -> int:
        """A call of this step gives these members to its caller; the number of that record."""
        keys = [log.key for log in _logs(ended) if not log.is_taken]
        return 0 if self._journal is None else self._journal.delivered(keys, step)

    async def kept(self, number: int, deadline: float) -> JournalError | None:
        """Wait until the journal has that record; why it cannot be written, if it cannot.

        Else who dies with what it gives may get others in its place when the call is made again.

        Args:
            number: 0 where there is none.
            deadline: Up to when that is waited for where the disk refuses it.
        """
        if self._journal is None or not number:
            return None
        await self._journal.kept(number, deadline)
        return None if self._journal.has_written(number) else self._journal.failure

    def unwanted(self, group: MemberGroup) -> None:
        """Nobody will have it any more."""
        if self._journal is not None and group.key is not None:
            self._journal.delivered([group.key], UNWANTED)


def _rank(member: Member) -> tuple[bool, bool]:
    """Where it stands among the members of a group that the journal has."""
    assert member.log is not None
    return not member.log.is_taken, not member.log.is_finished


def _logs(ended: Sequence[Any]) -> list[TrajectoryLog]:
    return [member.log for _, member, _ in ended if member.log is not None]


def _pull_of(fields: bytes, uid: str) -> _Pull:
    content = sorted(content_of(fields).items())
    value = b"".join(value for name, value in content if name != "uid")
    return uid, xxh3_128_digest(value)
