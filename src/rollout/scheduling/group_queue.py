"""The groups that the next call may take: from the journal, left by earlier calls, from sources."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rollout.scheduling.journal.pulled_before import name_at
from rollout.scheduling.member_group import MemberGroup
from rollout.scheduling.prompts import check_prompt
from rollout.scheduling.sources import PromptSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rollout.containment import Containment
    from rollout.observe.tally import Tally
    from rollout.scheduling.journal.group_log import GroupLog
    from rollout.scheduling.journal.pulled_before import PulledBefore
    from rollout.worker_threads import WorkerThreads

#: Sources whose position is known; of more, the one used longest ago is closed.
MAX_SOURCES = 16


class QueueUser(Protocol):
    """A call of `collect` or `stream_groups`, as the queue sees it.

    Attributes:
        step: The trainer's.
        source: Where its prompts come from.
        taken_names: Uids of groups that it has.
    """

    step: int
    source: PromptSource
    taken_names: set[str]

    def change(self) -> None:
        """Wake the tasks that wait for a change of this call."""


class GroupQueue:
    """Groups that were pulled and that no call has, and the sources of more.

    Args:
        log: The journal of groups.
        start: Starts a task of the runtime's.
        samples: Members of a group.

    Attributes:
        calls: Those that are open.
        leftovers: Groups that were pulled and not used, in the order in which they were; the next
            call takes them first, whatever its source is.
    """

    def __init__(
        self,
        log: GroupLog,
        threads: WorkerThreads,
        containment: Containment,
        tally: Tally,
        start: Callable[..., object],
        *,
        run_seed: int,
        samples: int,
    ) -> None:
        self.leftovers: list[MemberGroup] = []
        self.calls: dict[QueueUser, None] = {}
        self._log, self._run_seed, self._samples = log, run_seed, samples
        self._threads, self._start = threads, start
        self._containment, self._tally = containment, tally
        self._pulled = log.pulled
        self._sources: dict[int, PromptSource] = {}
        #: What the journal says that the calls which run had before; they take it first of all.
        self._delivered_before: list[MemberGroup] = []

    # Calls.

    def add_call(self, call: QueueUser) -> None:
        """Note a call that begins, and queue the groups that the journal has for its step."""
        if not self.calls:  # else those may have groups that are not queued here
            left = {group.source.number for group in self.leftovers}
            self._log.expect_no_lists_before(call.step, left)
        self._delivered_before += map(self._restore, self._log.given_in(call.step))
        if not call.source.is_replayed:
            names = {group.uid for group in (*self._delivered_before, *self.leftovers)}
            self.keep([*map(self._restore, self._log.given_in_none(names))])
        self.calls[call] = call.source.users[call] = None

    def remove_call(self, call: QueueUser) -> None:
        """Note that a call has ended."""
        self.calls.pop(call, None)
        call.source.users.pop(call, None)
        self._release(call.source)

    def pop_group(self, call: QueueUser) -> MemberGroup | None:
        """Take the group that was pulled first, of all that a call may have.

        One with a uid of its own that the call has already is left for a later call.
        """
        for group in self._delivered_before:
            if group.before is not None and group.before.step == call.step:
                self._delivered_before.remove(group)
                return group
        source = call.source
        if source.is_replayed:
            return None
        for store in (self.leftovers, source.pulled):  # what is left was pulled before
            for group in store:
                is_named = group.is_begun or group.waiting or group.before is not None
                if not (is_named and group.uid in call.taken_names):
                    store.remove(group)
                    return group
        return None

    def keep(self, groups: Iterable[MemberGroup]) -> None:
        """Queue groups for the next call, in the order in which they were pulled."""
        for group in groups:
            insort(self.leftovers, group, key=attrgetter("number"))

    def name_members(self, group: MemberGroup, call: QueueUser) -> None:
        """Make the members of a group that has none yet, with a uid that is new in the call."""
        if group.is_begun or group.waiting:
            call.taken_names.add(group.uid)
            return
        uid, count = group.uid, 1
        while group.before is None and group.uid in call.taken_names:
            count += 1
            group.prompt = msgspec.structs.replace(group.prompt, uid=f"{uid}@{count}")
        call.taken_names.add(group.uid)
        step = call.step if group.before is None else group.before.entry.step
        group.add_members(self._samples, step=step, run_seed=self._run_seed)
        self._log.enrol(group)

    def _restore(self, before: PulledBefore) -> MemberGroup:
        source, pulled = self._make_ended_source(()), before.entry.pulled or ""
        source.number, source.is_used_up = before.entry.source, before.entry.is_last
        version = before.version
        return MemberGroup(
            before.number, before.prompt, source, version=version, pulled=pulled, before=before
        )

    # Sources.

    def find_source(self, given: Any) -> PromptSource:
        """Return a caller's source where it was left; one that is over begins again."""
        source = self._sources.pop(id(given), None) or self._make_source(given)
        self._sources[id(given)] = source  # the last of them
        idle = [each for each in self._sources.values() if not (each.users or each.is_pulling)]
        for each in idle[: max(0, len(self._sources) - MAX_SOURCES)]:
            if each is not source:
                self.forget(each)
        return source

    def end_source(self, source: PromptSource) -> PromptSource:
        """Return a source without prompts, where the journal says that a caller got its end."""
        return self._make_ended_source(source.given, is_replayed=True)

    def forget(self, source: PromptSource) -> None:
        """Close a source and forget its position: given again, it begins again."""
        if self._sources.get(id(source.given)) is source:  # else it has begun again already
            del self._sources[id(source.given)]
        source.close()

    def ask(self, source: PromptSource) -> None:
        """Ask a source for one prompt, if it is not being asked."""
        if not source.is_pulling:
            source.ask(self._start, self._containment, self._tally)

    def _make_source(self, given: Any) -> PromptSource:
        return PromptSource(given, self._threads, self._read, self._note_pull)

    def _make_ended_source(self, given: Any, *, is_replayed: bool = False) -> PromptSource:
        source = self._make_source(given)
        source.is_over, source.is_replayed = True, is_replayed
        return source

    def _read(self, prompt: Any, source: PromptSource) -> MemberGroup | None:
        """Make a group of a prompt that was pulled; None where the journal has it."""
        position = source.count - 1
        check_prompt(prompt, f"source: prompt {position}")
        if self._log.is_repeated(prompt, source, position):
            return None
        number, self._pulled = self._pulled, self._pulled + 1
        name = name_at(prompt, position)
        if prompt.uid is None:  # `name_at` would give prompts of two sources one name
            prompt = msgspec.structs.replace(prompt, uid=f"prompt-{number}")
        return MemberGroup(number, prompt, source, pulled=name)

    def _note_pull(self, source: PromptSource) -> None:
        self._release(source)
        for call in tuple(source.users):
            call.change()

    def _release(self, source: PromptSource) -> None:
        """Leave what was pulled and no call took to the next call, once no call has the source."""
        if not source.users:
            self.keep(source.pulled)
            source.pulled.clear()
