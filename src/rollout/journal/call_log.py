"""The journal as calls use it: what was pulled, which groups there were, and who got them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rollout.errors import PromptError
from rollout.journal import records as kinds
from rollout.journal.index import RecordedTrajectory, find_oldest
from rollout.journal.records import GroupKey, Key, PromptRecord
from rollout.journal.trajectory_log import TrajectoryLog
from rollout.journal.values import (
    MAY_BE_TEXT,
    compare_prompts,
    find_media,
    hash_prompt,
    pack_prompt,
    read_prompt,
)
from rollout.scheduling.members import MemberGroup, RecordedGroup, SourceCallKey
from rollout.scheduling.run_log import RecordedCall, RunLog
from rollout.types import name_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.errors import JournalError
    from rollout.journal.index import RecordedPull
    from rollout.journal.journal import Journal
    from rollout.journal.records import Span
    from rollout.scheduling.members import Member
    from rollout.types import Prompt


class CallLog(RunLog):
    """Writes a journal, and gives calls what an earlier process had written.

    A call is resumed by its step and its number there, with its source as it stood when the call
    began. It pulls again what it had pulled, which is recognised by its content and passed over:
    the journal has it, and the source stands where it stood. What the call delivered comes first,
    then what was pulled and nobody got, then what is new.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal, self._file = journal, journal.file
        self._index = index = journal.index
        self.pull_count = max(index.pulls, default=-1) + 1
        pulls = index.pulls.values()
        self._left = [each for each in pulls if each.delivered_in is None and not each.is_dropped]
        #: The number of a step's next call; how many prompts a call is to pull again.
        self._next_numbers, self._pull_counts = Counter[int](), Counter(p.pulled_in for p in pulls)
        self._delivered: dict[SourceCallKey, list[RecordedPull]] = {}
        for key, pull in index.groups.items():
            if pull.delivered_in is not None and pull.group == key:
                self._delivered.setdefault(pull.delivered_in, []).append(pull)
        self._versions: dict[GroupKey, int | None] = {}
        for trajectory, each in index.trajectories.items():
            known = self._versions.get(trajectory.group)
            self._versions[trajectory.group] = find_oldest(known, each.version)
        #: By step: the number of its next call; the prompts of earlier processes' calls, by uid.
        self._next_call: dict[tuple[int, bool], int] = {}
        self._calls: dict[tuple[int, bool], dict[int, dict[str, Span]]] = {}
        for key, span in index.prompts.items():
            step = key.step, key.validate
            self._next_call[step] = max(self._next_call.get(step, 0), key.call + 1)
            if key not in index.groups:
                self._calls.setdefault(step, {}).setdefault(key.call, {})[key.uid] = span

    # Sources and groups.

    def note_pull(self, number: int, prompt: Prompt, call: SourceCallKey, where: str) -> bool:
        """See `RunLog`."""
        fields = pack_prompt(prompt, where, self._journal.values, ("extra",))
        repeats = self._index.repeats.get(hash_prompt(fields), [])
        found = [each for each in repeats if self._may_have(call, each.pulled_in.step)]
        if found:
            repeats.remove(pull := max(found, key=lambda each: each.pulled_in.step))
            is_own = self._pull_counts[call] > 0 and pull.pulled_in.step == call.step
            self._pull_counts[call if is_own else pull.pulled_in] -= 1
            pull.pulled_in = min(pull.pulled_in, call)  # a later call's is this one's now
            return False
        self._journal.put_media(find_media(prompt))
        self._file.put(kinds.PullRecord(number, call, fields))
        return True

    def take_call(self, step: int) -> RecordedCall:
        """See `RunLog`."""
        key = SourceCallKey(step, self._next_numbers[step])
        self._next_numbers[step] += 1
        delivered = self._delivered.pop(key, [])
        left = [pull for pull in self._left if pull.pulled_in <= key]
        self._left = [pull for pull in self._left if pull.pulled_in > key]
        groups = list(map(self._read_group, (*delivered, *left)))
        missing = self._index.missing.pop(key, None)
        return RecordedCall(key, groups, self._pull_counts[key], missing)

    def take_more(self, call: SourceCallKey) -> MemberGroup | None:
        """See `RunLog`."""
        others = [self._delivered[key] for key in self._delivered if self._may_have(call, key.step)]
        for pulls in (*others, self._left):
            for pull in pulls:
                if pull.pulled_in <= call:
                    pulls.remove(pull)
                    self._index.missing.pop(pull.delivered_in, None)  # it has less now
                    return self._read_group(pull)
        return None

    def _may_have(self, call: SourceCallKey, step: int) -> bool:
        """Whether a call may have what calls of this step had that are not made again."""
        return step == call.step or (step < call.step and step in self._next_numbers)

    def return_call(self, key: SourceCallKey) -> None:
        """See `RunLog`."""
        if self._next_numbers[key.step] == key.number + 1:  # else a later call has begun
            self._next_numbers[key.step] = key.number

    def _read_group(self, pull: RecordedPull) -> MemberGroup:
        fields, group = self._index.read(pull.span).fields, pull.group
        prompt = read_prompt(fields, uid=group and group.uid, media=self._index.contents)
        if group is None:  # no member of it began
            return MemberGroup(pull.number, name_prompt(prompt, f"prompt-{pull.number}"))
        version = self._versions.get(group) if pull.delivered_in is None else None
        before = RecordedGroup(group.step, group.call, pull.delivered_in, version)
        return MemberGroup(pull.number, prompt, before, version)

    def note_dropped(self, group: MemberGroup) -> None:
        """See `RunLog`."""
        self._file.put(kinds.DroppedRecord(group.number))

    # Members.

    def enrol_batch(self, members: Sequence[Member]) -> Callable[[], None]:
        """See `RunLog`."""
        firsts: dict[str, Member] = {}
        for member in members:
            firsts.setdefault(member.identity.uid, member)
        records: list[PromptRecord] = []
        media: dict[str, bytes] = {}
        faults: list[str] = []
        for uid, member in firsts.items():
            who, prompt = member.identity, member.prompt
            where, values = f"prompts[{who.group}]", self._journal.values
            media |= find_media(prompt)
            try:
                fields = pack_prompt(prompt, where, values, MAY_BE_TEXT)
                records.append(PromptRecord(GroupKey(who.step, uid, who.validate, 0), fields))
            except PromptError as error:
                faults.append(str(error))
        if faults:
            raise PromptError("\n".join(faults))

        def put() -> None:
            call = self._choose_call(records) if records else 0
            self._journal.put_media(media)
            for record in records:
                record.group = record.group._replace(call=call)
                if record.group not in self._index.prompts:
                    self._file.put(record)
            for member in members:
                self._give_log(member, call)

        return put

    def _choose_call(self, records: Sequence[PromptRecord]) -> int:
        """Choose the number of a call in its step: that of one with the same prompts, or a new one.

        Calls that were made at once may come in another order than before: their prompts tell.
        """
        step, _, validate, _ = records[0].group
        before, faults = self._calls.get((step, validate), {}), list[str]()
        uids = {record.group.uid for record in records}
        shared = {call: len(uids & prompts.keys()) for call, prompts in before.items()}
        for call in sorted(filter(shared.get, shared), key=shared.__getitem__, reverse=True):
            prompts, found = before[call], list[str]()
            for at, each in enumerate(records):
                name = each.group.uid
                known = self._index.read(prompts[name]).fields if name in prompts else each.fields
                differences = compare_prompts(known, each.fields)
                if differences:
                    found.append(
                        f"prompts[{at}] (uid {name!r}): is not the prompt of the journal "
                        f"{self._journal.path}; differs in {', '.join(differences)}"
                    )
            if not found:
                del before[call]
                return call
            faults = faults or found
        if faults:
            raise PromptError("\n".join(faults))
        return self._take_number(step, validate)

    def _take_number(self, step: int, validate: bool) -> int:
        call = self._next_call.get((step, validate), 0)
        self._next_call[step, validate] = call + 1
        return call

    def _give_log(self, member: Member, call: int) -> None:
        who = member.identity
        key = Key(who.step, who.uid, who.member, who.validate, call)
        recorded = self._index.trajectories.pop(key, None)
        member.log = TrajectoryLog(key, recorded or RecordedTrajectory(), self._journal)

    def enrol(self, group: MemberGroup) -> None:
        """See `RunLog`. Members that an earlier process delivered or finished come first."""
        before, step = group.before, group.waiting[0].identity.step
        if before is not None:
            call = before.call
        else:
            call = self._take_number(step, False)
            key = GroupKey(step, group.uid, False, call)
            self._file.put(kinds.GroupRecord(group.number, key))
        for member in group.waiting:
            self._give_log(member, call)
        group.waiting.sort(key=lambda each: (not each.was_taken, not each.was_finished))

    def find_trajectory(self, member: Member) -> Trajectory | None:
        """See `RunLog`."""
        log: TrajectoryLog = member.log
        return None if member.is_carried else log.read_end(member.prompt, member.identity.group)

    def note_ends(self, ended: Mapping[Member, Trajectory]) -> None:
        """See `RunLog`."""
        ends: dict[TrajectoryLog, bytes] = {}
        for member, trajectory in ended.items():
            log: TrajectoryLog = member.log
            packed = None if member.was_finished or log.number else log.pack_end(trajectory)
            if packed is not None:
                ends[log] = packed
        if ends:
            number = self._file.put(kinds.EndRecord([(log.key, end) for log, end in ends.items()]))
            for log in ends:
                log.number = number

    def note_delivery(
        self, members: Sequence[Member], call: SourceCallKey | None = None, missing: int = 0
    ) -> int:
        """See `RunLog`."""
        keys = [
            each.log.key
            for each in members
            if not each.was_taken or (each.group.before and each.group.before.delivered_in != call)
        ]
        if not (keys or missing):
            return 0
        return self._file.put(kinds.DeliveredRecord(keys, call, missing))

    async def wait_written(
        self, number: int, deadline: float, is_over: Callable[[], bool] = lambda: False
    ) -> JournalError | None:
        """See `RunLog`."""
        return await self._file.wait_written(number, deadline, is_over)
