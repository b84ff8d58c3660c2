"""What a call of groups hands to its caller, takes back, and says of the end of its source."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.chat.group import Group
    from rollout.errors import JournalError
    from rollout.limits import Deadline
    from rollout.scheduling.group_book import GroupBook
    from rollout.scheduling.group_desk import GroupDesk
    from rollout.scheduling.prompt_source import PromptSource
    from rollout.scheduling.pulled_group import PulledGroup


class GroupHandover:
    """Of one call.

    Args:
        deadline: Up to when it waits for a journal that cannot be written.
        change: Has those look again who wait for a group.
    """

    def __init__(
        self,
        desk: GroupDesk,
        book: GroupBook,
        source: PromptSource,
        step: int,
        deadline: Deadline,
        change: Callable[[], None],
    ) -> None:
        self._desk, self._book, self._source = desk, book, source
        self._step, self._deadline, self._change = step, deadline, change
        self._has_told_end = False

    async def give(self, groups: Sequence[PulledGroup]) -> JournalError | None:
        """The caller gets these now, unless it is cancelled; why no journal has that, if none has.

        They are the caller's all the same.
        """
        members, log = self._book.wanted.members, self._desk.log
        new = [group for group in groups if not group.delivery]  # else a caller was cancelled
        ended = [each for group in new for each in group.wanted(members)]
        number = log.delivered(ended, self._step)
        for group in new:
            group.delivery = number
        try:
            last = max((group.delivery for group in groups), default=0)
            return await log.kept(last, self._deadline.at)
        except BaseException:
            self.give_back(groups)
            raise

    def give_back(self, groups: Sequence[PulledGroup]) -> None:
        """The caller does not get what it has taken: this call gives it again, or the next one."""
        if not self._book.take_back(groups):
            for group in groups:
                group.call = None
            self._desk.keep(groups)
        self._change()

    def note_missing(self, missing: int) -> None:
        """The caller gets the others, and no error."""
        self._desk.log.returns_short(self._step, missing)

    def tell_end(self, *, is_recorded: bool) -> None:
        """The caller learns that there are no more groups: a source that is over begins again.

        Args:
            is_recorded: Whether a resumption is to tell it so as well.
        """
        source = self._source
        if source.is_over and not self._has_told_end:
            self._has_told_end = True
            self._desk.forget(source)
            if is_recorded and not source.is_replayed:
                self._desk.log.source_ended(source, self._step)


def made(group: PulledGroup) -> Group:
    """What the consumer of an accepted group gets."""
    assert group.made is not None
    return group.made
