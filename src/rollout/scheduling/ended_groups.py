"""Members that have ended, until their group is whole."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import anyio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.chat.trajectory import Trajectory
    from rollout.scheduling.prompts import Member


class Ended(NamedTuple):
    """A member that has ended, its row, and its trajectory."""

    row: int
    member: Member
    trajectory: Trajectory


class EndedGroups:
    """Members that have ended wait here for those of their group that are wanted too.

    Args:
        wanted: How many are, by the position of the group.
    """

    def __init__(self, wanted: Mapping[int, int]) -> None:
        self._wanted = wanted
        self._waiting: dict[int, list[Ended]] = defaultdict(list)

    @property
    def waiting(self) -> set[Member]:
        """Members that wait for others."""
        return {each.member for ended in self._waiting.values() for each in ended}

    def add(self, ended: Ended) -> list[Ended]:
        """Its group in member order, once that is whole; before that nothing."""
        group = ended.member.identity.group
        ended.member.concluding_since = anyio.current_time()
        self._waiting[group].append(ended)
        if len(self._waiting[group]) < self._wanted[group]:
            return []
        return sorted(self._waiting.pop(group), key=lambda each: each.member.identity.member)
