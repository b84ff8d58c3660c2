"""The journal as calls use it: what was pulled, which groups there were, and who got them."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from typing import TYPE_CHECKING

from rollout.errors import JournalError, PromptError
from rollout.journal import records as kinds
from rollout.journal.index import PromptKey, find_oldest, get_prompt_key
from rollout.journal.records import Key, PromptRecord
from rollout.journal.trajectory_log import NOTHING, TrajectoryLog
from rollout.journal.values import (
    MAY_BE_TEXT,
    compare_prompts,
    find_media,
    pack_prompt,
    read_prompt,
)
from rollout.scheduling.member_group import RecordedGroup
from rollout.scheduling.run_log import RunLog, list_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.journal.index import RecordedPull
    from rollout.journal.journal import Journal
    from rollout.scheduling.member_group import Ended, Member, MemberGroup
    from rollout.types import Prompt


class CallLog(RunLog):
    """Writes a journal, and gives calls what an earlier process had written.

    A call is resumed by its step, with its source as it stood when the call began. It pulls again
    what it had pulled, which is recognised by its content and passed over: the journal has it, and
    the source stands where it stood. What the call delivered comes first, then what was pulled and
    nobody got, then what is new.

    Args:
        has_group_reward: Whether a member is finished only with its group.
    """

    def __init__(self, journal: Journal, *, has_group_reward: bool) -> None:
        self._journal, self._has_group_reward = journal, has_group_reward
        index, self._lock = journal.index, threading.Lock()
        self.pull_count = max(index.pulls, default=-1) + 1
        self._repeats: dict[int, Counter[bytes]] = {}
        for pull in index.pulls.values():
            self._repeats.setdefault(pull.step, Counter())[pull.digest] += 1
        self._missing = dict(index.missing)
        groups = {pull.group: pull for pull in index.pulls.values() if pull.group is not None}
        groups_of_pulls = set(groups)
        self._delivered = {
            step: [groups.pop(key) for key in keys if key in groups]
            for step, keys in index.delivered.items()
        }
        begun = groups.values()
        fresh = (pull for pull in index.pulls.values() if pull.group is None)
        left = [pull for pull in (*begun, *fresh) if not pull.is_dropped]
        self._left = sorted(left, key=lambda pull: pull.number)
        self._versions: dict[PromptKey, int | None] = {}
        for trajectory, each in index.trajectories.items():
            key = get_prompt_key(trajectory)
            self._versions[key] = find_oldest(self._versions.get(key), each.version)
        #: The next call of a step; by step and uid the calls of before that may be made again.
        self._next_call: dict[tuple[int, bool], int] = {}
        self._calls: dict[tuple[int, bool, str], list[int]] = {}
        for key in index.prompts:
            step = key.step, key.validate
            self._next_call[step] = max(self._next_call.get(step, 0), key.call + 1)
            if key not in groups_of_pulls:
                self._calls.setdefault((*step, key.uid), []).append(key.call)

    def check_announced(self) -> None:
        """See `Journal.check_announced`."""
        self._journal.check_announced()

    def note_pull(self, number: int, prompt: Prompt, step: int, where: str) -> bool:
        """See `RunLog`."""
        try:
            fields = pack_prompt(prompt, where, self._journal.unwritable, ("extra",))
        except JournalError as error:
            raise PromptError(f"{error} (journal.path is set)") from error
        digest = hashlib.blake2b(fields, digest_size=16).digest()
        repeats = self._repeats.get(step)
        if repeats is not None and repeats[digest]:
            repeats[digest] -= 1
            return False
        self._journal.put_media(find_media(prompt))
        self._journal.put(kinds.PullRecord(number, step, digest, fields))
        return True

    def count_pulls(self, step: int) -> int:
        """See `RunLog`."""
        repeats = self._repeats.get(step)
        return 0 if repeats is None else repeats.total()

    def take_delivered(self, step: int) -> list[RecordedGroup]:
        """See `RunLog`."""
        return [self._read_group(pull, step) for pull in self._delivered.pop(step, ())]

    def take_left(self, step: int) -> list[RecordedGroup]:
        """See `RunLog`."""
        left = [pull for pull in self._left if pull.step <= step]
        self._left = [pull for pull in self._left if pull.step > step]
        return list(map(self._read_group, left))

    def _read_group(self, pull: RecordedPull, delivered_in: int | None = None) -> RecordedGroup:
        record, group = self._journal.read(pull.span), pull.group
        assert isinstance(record, kinds.PullRecord)
        uid = None if group is None else group.uid
        prompt = read_prompt(record.fields, uid=uid, media=self._journal.media)
        if group is None:
            return RecordedGroup(pull.number, prompt)
        version = self._versions.get(group) if delivered_in is None else None
        return RecordedGroup(pull.number, prompt, group.step, group.call, delivered_in, version)

    def take_missing(self, step: int) -> int | None:
        """See `RunLog`."""
        return self._missing.pop(step, None)

    def note_missing(self, step: int, missing: int) -> None:
        """See `RunLog`."""
        self._journal.put(kinds.ShortRecord(step, missing))

    def enrol_batch(self, members: Sequence[Member]) -> Callable[[], None]:
        """See `RunLog`."""
        records: dict[str, PromptRecord] = {}
        media: dict[str, bytes] = {}
        faults: list[str] = []
        for member in members:
            who, prompt = member.identity, member.prompt
            if who.uid not in records:
                records[who.uid] = PromptRecord(who.step, who.uid, who.validate, 0, b"")
                media |= find_media(prompt)
                try:
                    where, unwritable = f"prompts[{who.group}]", self._journal.unwritable
                    records[who.uid].fields = pack_prompt(prompt, where, unwritable, MAY_BE_TEXT)
                except JournalError as error:
                    faults.append(f"{error} (journal.path is set)")
        if faults:
            raise PromptError("\n".join(faults))
        if records:
            with self._lock:
                call = self._choose_call(list(records.values()))
            for record in records.values():
                record.call = call
            for member in members:
                self._give_log(member, call)

        def put() -> None:
            self._journal.put_media(media)
            for record in records.values():
                if _get_key(record) not in self._journal.index.prompts:
                    self._journal.put(record)

        return put

    def _choose_call(self, records: Sequence[PromptRecord]) -> int:
        """Choose the number of a call in its step: that of one with the same prompts, or a new one.

        Calls that were made at once may come in another order than before: their prompts tell.
        """
        step, faults = (records[0].step, records[0].validate), list[str]()
        for call in self._calls.get((*step, records[0].uid), ()):
            found = [f for at, each in enumerate(records) for f in self._compare(at, each, call)]
            if not found:
                for each in records:
                    calls = self._calls.get((*step, each.uid), [])
                    if call in calls:
                        calls.remove(call)
                return call
            faults = faults or found
        if faults:
            raise PromptError("\n".join(faults))
        return self._take_number(step)

    def _take_number(self, step: tuple[int, bool]) -> int:
        call = self._next_call.get(step, 0)
        self._next_call[step] = call + 1
        return call

    def _compare(self, at: int, record: PromptRecord, call: int) -> list[str]:
        """Say how a prompt differs from the one that a call of before had of its uid."""
        span = self._journal.index.prompts.get(_get_key(record)._replace(call=call))
        known = None if span is None else self._journal.read(span)
        names = []
        if isinstance(known, PromptRecord):
            names = compare_prompts(known.fields, record.fields)
        return names and [
            f"prompts[{at}] (uid {record.uid!r}): is not the prompt of the journal "
            f"{self._journal.path}; differs in {', '.join(names)}"
        ]

    def _give_log(self, member: Member, call: int) -> None:
        who = member.identity
        key = Key(who.step, who.uid, who.member, who.validate, call)
        recorded = self._journal.index.trajectories.pop(key, NOTHING)
        member.log = TrajectoryLog(key, self._journal, recorded, recorded.start)

    def enrol(self, group: MemberGroup) -> None:
        """See `RunLog`. Members that an earlier process delivered or finished come first."""
        before, step = group.before, group.waiting[0].identity.step
        if before is not None and before.call is not None:
            call = before.call
        else:
            with self._lock:
                call = self._take_number((step, False))
            self._journal.put(kinds.GroupRecord(group.number, step, group.uid, call))
        for member in group.waiting:
            self._give_log(member, call)
        if before is not None:
            group.waiting.sort(key=_rank)

    def find_trajectory(self, member: Member) -> Trajectory | None:
        """See `RunLog`."""
        if not isinstance(member.log, TrajectoryLog) or member.is_carried:
            return None
        return member.log.read_end(member.prompt, member.identity.group)

    def note_end(self, member: Member, trajectory: Trajectory) -> None:
        """See `RunLog`."""
        if not self._has_group_reward:
            self._put_ends([(member, trajectory)])

    def is_rewarded(self, members: Sequence[Member]) -> bool:
        """See `RunLog`."""
        return all(log.is_finished for log in list_logs(members))

    def note_rewards(self, ended: Sequence[Ended]) -> None:
        """See `RunLog`."""
        if self._has_group_reward:
            self._put_ends(ended)

    def _put_ends(self, members: Iterable[tuple[Member, Trajectory]]) -> None:
        """Write the ends of members that no process has written, in one record."""
        ends: list[tuple[Key, bytes]] = []
        logs: list[TrajectoryLog] = []
        for member, trajectory in members:
            log = member.log
            if isinstance(log, TrajectoryLog) and not (log.is_finished or log.number):
                end = log.pack_end(trajectory)
                if end is not None:
                    ends.append(end)
                    logs.append(log)
        if not ends:
            return
        number = self._journal.put(kinds.EndRecord(ends))
        for log in logs:
            log.number = number

    async def wait_written(
        self, members: Sequence[Member], deadline: float, is_over: Callable[[], bool]
    ) -> JournalError | None:
        """See `RunLog`."""
        for log in list_logs(members):
            if not await self._journal.wait_written(log.number, deadline, is_over):
                return self._get_failure()
        return None

    def note_delivery(self, members: Sequence[Member], step: int | None = None) -> int:
        """See `RunLog`."""
        logs = [each.log for each in members if isinstance(each.log, TrajectoryLog)]
        return self._journal.note_delivery([log.key for log in logs if not log.is_taken], step)

    async def wait_delivery(self, number: int, deadline: float) -> JournalError | None:
        """See `RunLog`."""
        journal = self._journal
        if await journal.wait_written(number, deadline):
            return None
        return self._get_failure()

    def _get_failure(self) -> JournalError:
        return self._journal.failure or JournalError("the journal cannot be written")

    def note_dropped(self, group: MemberGroup) -> None:
        """See `RunLog`."""
        self._journal.put(kinds.DroppedRecord(group.number))


def _get_key(record: PromptRecord) -> PromptKey:
    return PromptKey(record.step, record.uid, record.validate, record.call)


def _rank(member: Member) -> tuple[bool, bool]:
    assert member.log is not None
    return not member.log.is_taken, not member.log.is_finished
