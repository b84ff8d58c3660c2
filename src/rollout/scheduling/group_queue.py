"""The groups that the next call may take: from the journal, left by earlier calls, from sources."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rollout.agents.identity import named
from rollout.scheduling.member_group import MemberGroup
from rollout.scheduling.prompts import check_prompt
from rollout.scheduling.sources import PromptSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rollout.containment import Containment
    from rollout.observe.tally import Tally
    from rollout.scheduling.recorded import RecordedGroup
    from rollout.scheduling.run_log import RunLog
    from rollout.worker_threads import WorkerThreads

#: Sources whose position is known; of more, the one used longest ago is closed.
MAX_SOURCES = 16


class QueueUser(Protocol):
    """A call of `collect` or `stream_groups`, as the queue sees it.

    Attributes:
        step: The trainer's.
        is_replayed: What it delivered in an earlier process is all that it has.
        source: Where its prompts come from.
        taken_names: Uids of groups that it has.
    """

    step: int
    is_replayed: bool
    source: PromptSource
    taken_names: set[str]

    def change(self) -> None:
        """Wake the tasks that wait for a change of this call."""


class GroupQueue:
    """Groups that were pulled and that no call has, and the sources of more.

    Args:
        log: The journal.
        start: Starts a task of the runtime's.
        samples: Members of a group.

    Attributes:
        calls: Those that are open.
        leftovers: Groups that were pulled and not used, in the order in which they were; the next
            call takes them first, whatever its source is.
    """

    def __init__(
        self,
        log: RunLog,
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
        self._pulled = log.pull_count
        self._sources: dict[int, PromptSource] = {}
        #: What the journal says that the calls which run had before; they take it first of all.
        self._delivered_before: list[MemberGroup] = []

    # Calls.

    def add_call(self, call: QueueUser) -> None:
        """Note a call that begins, and queue the groups that the journal has for its step."""
        self._delivered_before += map(self._restore, self._log.take_delivered(call.step))
        self.keep([*map(self._restore, self._log.take_left(call.step))])
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
            if group.before is not None and group.before.delivered_in == call.step:
                self._delivered_before.remove(group)
                return group
        if call.is_replayed:
            return None
        for store in (self.leftovers, call.source.pulled):  # what is left was pulled before
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
        step = call.step if group.before is None else group.before.step
        group.add_members(self._samples, step=step, run_seed=self._run_seed)
        self._log.enrol(group)

    def _restore(self, before: RecordedGroup) -> MemberGroup:
        source = self._make_source(())
        source.is_over = True
        if before.call is None:  # no member of it began
            prompt = named(before.prompt, f"prompt-{before.number}")
            return MemberGroup(before.number, prompt, source)
        version = before.version
        return MemberGroup(before.number, before.prompt, source, version=version, before=before)

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

    def forget(self, source: PromptSource) -> None:
        """Close a source and forget its position: given again, it begins again."""
        if self._sources.get(id(source.given)) is source:  # else it has begun again already
            del self._sources[id(source.given)]
        source.close()

    def ask(self, source: PromptSource, step: int) -> None:
        """Ask a source for one prompt, if it is not being asked.

        Args:
            step: Of the call that wants it.
        """
        if not source.is_pulling:
            source.step = step
            source.ask(self._start, self._containment, self._tally)

    def _make_source(self, given: Any) -> PromptSource:
        return PromptSource(given, self._threads, self._read, self._note_pull)

    def _read(self, prompt: Any, source: PromptSource) -> MemberGroup | None:
        """Make a group of a prompt that was pulled; None where the journal has it."""
        number, where = self._pulled, f"source: prompt {source.count - 1}"
        check_prompt(prompt, where)
        if not self._log.note_pull(number, prompt, source.step, where):
            return None
        self._pulled += 1
        return MemberGroup(number, named(prompt, f"prompt-{number}"), source)

    def _note_pull(self, source: PromptSource) -> None:
        self._release(source)
        for call in tuple(source.users):
            call.change()

    def _release(self, source: PromptSource) -> None:
        """Leave what was pulled and no call took to the next call, once no call has the source."""
        if not source.users:
            self.keep(source.pulled)
            source.pulled.clear()
