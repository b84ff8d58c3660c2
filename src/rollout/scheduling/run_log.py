"""What calls record of a run, and get from the record of an earlier process: nothing by default.

`rollout.journal.call_log` has the log that writes a journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rollout.scheduling.members import Member, MemberGroup, SourceCallKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.errors import JournalError
    from rollout.types import Prompt


class RecordedCall(NamedTuple):
    """A `collect` or `stream_groups`, and what earlier processes recorded of it.

    Attributes:
        groups: Those that it delivered, in their order; then what was pulled up to this call, and
            neither delivered nor dropped.
        pull_count: How many prompts it pulled; it pulls these again.
        missing: Without how many groups it returned; None: it did not return so.
    """

    key: SourceCallKey
    groups: Sequence[MemberGroup] = ()
    pull_count: int = 0
    missing: int | None = None


class RunLog:
    """Records nothing, and knows nothing of earlier processes.

    Attributes:
        pull_count: How many prompts earlier processes pulled.
    """

    pull_count = 0

    # Sources and groups.

    def note_pull(self, number: int, prompt: Prompt, call: SourceCallKey, where: str) -> bool:
        """Record a prompt that a call pulled; False where one of its step did so before.

        Raises:
            PromptError: It holds what cannot be recorded; `where` names it.
        """
        return True

    def take_call(self, step: int) -> RecordedCall:
        """Number a call of groups of this step, and return what there is for it; once."""
        return RecordedCall(SourceCallKey(step))

    def take_more(self, call: SourceCallKey) -> MemberGroup | None:
        """Return a group for a call that wants more than there was for it; None: ask its source.

        One that was pulled up to this call, and that a call had that is not made again up to now.
        """
        return None

    def return_call(self, key: SourceCallKey) -> None:
        """Give the number of a call, of which nobody got anything, to the next one."""

    def note_dropped(self, group: MemberGroup) -> None:
        """Record that nobody will get a group that was pulled."""

    # Members.

    def enrol_batch(self, members: Sequence[Member]) -> Callable[[], None]:
        """Prepare the members of a list's call, in any thread; return what gives them their logs.

        Raises:
            PromptError: A prompt holds what cannot be recorded; or, by what is returned, it
                differs from that of before.
        """
        return lambda: None

    def enrol(self, group: MemberGroup) -> None:
        """Give the members of a group, all of which wait, their logs."""

    def find_trajectory(self, member: Member) -> Trajectory | None:
        """Return the trajectory of a member that an earlier process finished."""
        return None

    def note_ends(self, ended: Mapping[Member, Trajectory]) -> None:
        """Record finished members; those of a group with a reward together, once they have it."""

    def note_delivery(
        self, members: Sequence[Member], call: SourceCallKey | None = None, missing: int = 0
    ) -> int:
        """Record that the caller gets these members; return the record's number, 0 where none is.

        Args:
            call: That which delivers groups; None: members of a list.
            missing: How many groups fewer than it wanted a call returns without an error.
        """
        return 0

    async def wait_written(
        self, number: int, deadline: float, is_over: Callable[[], bool] = lambda: False
    ) -> JournalError | None:
        """Wait until a record, 0 for none, is written; return why it cannot be.

        A disk that refuses it is waited for until the deadline, or until `is_over`.
        """
        return None
