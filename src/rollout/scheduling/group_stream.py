"""What `collect` and `stream_groups` give: accepted groups as they finish."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import anyio

from rollout.chat.trajectory import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.errors import JournalError
    from rollout.scheduling.calls import Call
    from rollout.scheduling.member_group import MemberGroup

#: A consumer that waits for so long, and for itself, gets a hint in the log.
HINT_S = 5.0


class GroupStream(AsyncIterator[Group]):
    """Accepted groups as they finish; ends where there will be no more."""

    def __init__(self, call: Call) -> None:
        self._call, self._groups, self._scheduler = call, call.groups, call.scheduler

    async def receive(self) -> Group | None:
        """The next accepted group; None where there will be none.

        Raises:
            PromptError, LimitExceeded, RolloutError: As `RolloutRuntime.collect`.
        """
        group, call = await self.take(), self._call
        if group is not None:
            await self.record([group])
            self.note_accepted([group])
            return group.result
        if call.failure is not None:
            raise call.failure
        if not call.is_leaving:  # else its caller has left, and learns nothing
            self.note_source_end()
        return None

    async def __anext__(self) -> Group:
        try:
            group = await self.receive()
        except StopAsyncIteration as error:  # else the loop ends as if all was well
            raise RuntimeError("the source, or accept, raised StopAsyncIteration") from error
        if group is None:
            raise StopAsyncIteration
        return group

    def metrics(self) -> dict[str, float]:
        """What the stream took so far of what it had run; see `rollout.scheduling.selection`."""
        running = [member.tokens for member in self._call.list_members(has_slot=True)]
        return {**self._groups.count(), **self._call.selection.metrics(running)}

    # What `collect` does with all of them.

    async def take(self) -> MemberGroup | None:
        """Take the next accepted group; None where there is none: `Call.find_error` says why.

        `record` must follow, or `take_back`.
        """
        hint_at = anyio.current_time() + HINT_S
        while (group := self._groups.take()) is None:
            if self._call.failure is not None or self._groups.is_complete:
                return None
            had = self._groups.consumed + self._groups.counts["refused"]
            if not self._call.is_awaited and had >= self._call.had:
                self._call.is_awaited = True
                self._scheduler.change()
            with anyio.CancelScope(deadline=hint_at) as scope:
                await self._scheduler.wait_change()
            if scope.cancelled_caught:
                hint_at += HINT_S
                if self._groups.waits_for:
                    self._scheduler.tally.hint("update_weights", self._groups.waits_for)
        self._scheduler.change()
        return group

    async def record(self, groups: Sequence[MemberGroup], missing: int = 0) -> JournalError | None:
        """Record that the caller gets these groups; return why the journal could not, if so.

        The caller gets them all the same. Cancelled meanwhile, it has them taken back.

        Args:
            missing: How many groups fewer than it wanted the caller gets, without an error.
        """
        call, log, count = self._call, self._scheduler.log, self._groups.wanted.members
        new = [group for group in groups if not group.delivery]  # else a caller was cancelled
        members = [each.member for group in new for each in group.choose(count)]
        number = log.note_delivery(members, call.step, missing)
        for group in new:
            group.delivery = number
        try:
            last = max((group.delivery for group in groups), default=0)
            return await log.wait_written(last, call.deadline.at)
        except BaseException:
            self.take_back(groups)
            raise

    def take_back(self, groups: Sequence[MemberGroup]) -> None:
        """Return groups that the caller did not get to this call, or to the next one."""
        if self._call.is_ending:
            self._scheduler.queue.keep(groups)
        else:
            self._groups.take_back(groups)
        self._scheduler.change()

    def note_accepted(self, groups: Sequence[MemberGroup]) -> None:
        """Count what the caller gets."""
        for group in groups:
            if group.result is not None:
                self._call.selection.note_accepted(group.result.trajectories)

    def note_source_end(self) -> None:
        """Forget a source that is over, as the caller learns now; named again, it begins again."""
        source = self._call.source
        if source is not None and source.is_over:
            self._scheduler.queue.forget(source)
