"""What calls record of a run, and get from the record of an earlier process: nothing by default.

`rollout.journal.call_log` has the log that writes a journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.errors import JournalError
    from rollout.scheduling.member_group import Ended, Member, MemberGroup, RecordedGroup
    from rollout.types import Prompt


class RunLog:
    """Records nothing, and knows nothing of earlier processes.

    Attributes:
        pull_count: How many prompts earlier processes pulled.
    """

    pull_count = 0

    def check_announced(self) -> None:
        """Raise a `ConfigError` where nobody has announced which weights the engines have."""

    # Sources and groups of earlier processes.

    def note_pull(self, number: int, prompt: Prompt, step: int, where: str) -> bool:
        """Record a prompt that a call of this step pulled; False where it did so before.

        Raises:
            PromptError: It holds what cannot be recorded; `where` names it.
        """
        return True

    def count_pulls(self, step: int) -> int:
        """Return how many prompts of an earlier call of this step it has not pulled again."""
        return 0

    def take_delivered(self, step: int) -> list[RecordedGroup]:
        """Return the groups that a call of this step delivered, in their order; once."""
        return []

    def take_left(self, step: int) -> list[RecordedGroup]:
        """Return what was pulled up to this step, and neither delivered nor dropped; once."""
        return []

    def take_missing(self, step: int) -> int | None:
        """Return without how many groups a `collect` of this step returned; None: it did not."""
        return None

    def note_missing(self, step: int, missing: int) -> None:
        """Record that a `collect` returns without so many groups, and without an error."""

    def note_dropped(self, group: MemberGroup) -> None:
        """Record that nobody will get a group that was pulled."""

    # Members.

    def enrol_batch(self, members: Sequence[Member]) -> Callable[[], None]:
        """Give the members of a list's call their logs, in any thread; return what records them.

        Raises:
            PromptError: A prompt holds what cannot be recorded, or differs from that of before.
        """
        return lambda: None

    def enrol(self, group: MemberGroup) -> None:
        """Give the members of a group, all of which wait, their logs."""

    def find_trajectory(self, member: Member) -> Trajectory | None:
        """Return the trajectory of a member that an earlier process finished."""
        return None

    def note_end(self, member: Member, trajectory: Trajectory) -> None:
        """Record a trajectory; with a group reward, `note_rewards` does that for its group."""

    def is_rewarded(self, members: Sequence[Member]) -> bool:
        """Whether an earlier process rewarded these members of a group."""
        return False

    def note_rewards(self, ended: Sequence[Ended]) -> None:
        """Record the members of a group, which have all their rewards."""

    async def wait_written(
        self, members: Sequence[Member], deadline: float, is_over: Callable[[], bool]
    ) -> JournalError | None:
        """Wait until the ends of members are recorded; return why they cannot be.

        A disk that refuses them is waited for until the deadline, or until `is_over`.
        """
        return None

    def note_delivery(self, members: Sequence[Member], step: int | None = None) -> int:
        """Record that the caller, of groups one of this step, gets these; the record's number."""
        return 0

    async def wait_delivery(self, number: int, deadline: float) -> JournalError | None:
        """Wait until that record is written; return why it cannot be."""
        return None


def list_logs(members: Sequence[Member]) -> list[Any]:
    """Return the logs of members that have one."""
    return [each.log for each in members if each.log is not None]
