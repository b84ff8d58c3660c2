"""Which replica holds which prefix: of a trajectory, and of the prompt that a group shares."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from rollout.engine.routing.replica_state import ReplicaState

if TYPE_CHECKING:
    from rollout.engine.routing.dispatch import Dispatch

#: Holders of a group's prompt that are remembered, the latest: more of them decide nothing.
MAX_HOLDERS = 8
#: Trajectories that are remembered; a later turn of an older one is placed again.
MAX_SESSIONS = 100_000
#: So many more are, until they are forgotten at once: to find the first of a dict takes longer, the
#: more before it have been removed.
SURPLUS = 1000


_NO_HOLDERS: Mapping[ReplicaState, int] = {}


class _Group(msgspec.Struct, eq=False, gc=False):
    """Trajectories with one prompt.

    Attributes:
        prompt_tokens: Length of the shared prompt: the shortest that one of them began with.
        holders: Where trajectories began or moved last, with the epoch of the cache that got it;
            replaced, never changed, since groups may share it.
        checked: The number of lost caches when the holders were checked for it.
        members: Trajectories that are remembered.
    """

    prompt_tokens: int
    checked: int
    holders: Mapping[ReplicaState, int] = msgspec.field(default_factory=lambda: _NO_HOLDERS)
    members: int = 0


class _Session(msgspec.Struct, eq=False, gc=False):
    group_id: str
    replica: ReplicaState
    cache_epoch: int = 0
    tokens: int = 0


class Sessions:
    """The trajectories and groups that have been seen and not been forgotten."""

    def __init__(self) -> None:
        #: Those of which there was a request last are the last.
        self._sessions: dict[str, _Session] = {}
        self._groups: dict[str, _Group] = {}
        #: The holders of the groups that have one: a group of one trajectory never has more.
        self._alone: dict[ReplicaState, Mapping[ReplicaState, int]] = {}
        self._lost_caches = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def group_count(self) -> int:
        """Groups of which a trajectory is remembered."""
        return len(self._groups)

    def recall(self, dispatch: Dispatch, group_id: str) -> None:
        """Tell a request where its trajectory was and where its prefix is."""
        session = self._sessions.get(dispatch.session_id)
        if session is not None and session.replica.is_offered:
            replica = dispatch.pinned = session.replica
            if session.cache_epoch == replica.cache_epoch:
                dispatch.warm_tokens = min(session.tokens, dispatch.prompt_tokens)
        group = self._groups.get(group_id) if group_id else None
        if group is not None:
            dispatch.shared_tokens = min(group.prompt_tokens, dispatch.prompt_tokens)
            if group.checked != self._lost_caches:
                group.checked = self._lost_caches
                kept = {r: e for r, e in group.holders.items() if e == r.cache_epoch}
                group.holders = kept or _NO_HOLDERS
            dispatch.holders = group.holders
        elif group_id in self._sessions:  # a branch of a trajectory that is in no group
            trunk = self._sessions[group_id]
            dispatch.shared_tokens = min(trunk.tokens, dispatch.prompt_tokens)
            if trunk.replica.is_offered and trunk.cache_epoch == trunk.replica.cache_epoch:
                dispatch.holders = self._with(_NO_HOLDERS, trunk.replica)

    def note(self, dispatch: Dispatch, group_id: str) -> None:
        """Remember where a request went."""
        session = self._sessions.pop(dispatch.session_id, None)
        if session is None:
            session = self._begin(dispatch, group_id)
        self._sessions[dispatch.session_id] = session
        if len(self._sessions) >= MAX_SESSIONS + SURPLUS:
            for session_id in tuple(islice(self._sessions, SURPLUS)):
                self.forget(session_id)
        replica = session.replica = dispatch.replica
        session.cache_epoch = replica.cache_epoch
        session.tokens = dispatch.prompt_tokens
        if session.group_id and not (replica is dispatch.pinned and dispatch.warm_tokens):
            group = self._groups[session.group_id]
            if replica not in group.holders:
                group.holders = self._with(group.holders, replica)

    def _with(
        self, holders: Mapping[ReplicaState, int], replica: ReplicaState
    ) -> Mapping[ReplicaState, int]:
        """These and one more; without the earliest where they are too many."""
        epoch = replica.cache_epoch
        if holders:
            kept = list(holders.items())[1 - MAX_HOLDERS :]
            return {**dict(kept), replica: epoch}
        alone = self._alone.get(replica)
        if alone is None or alone[replica] != epoch:
            alone = self._alone[replica] = {replica: epoch}
        return alone

    def _begin(self, dispatch: Dispatch, group_id: str) -> _Session:
        if group_id:
            group = self._groups.get(group_id)
            if group is None:
                group = self._groups[group_id] = _Group(dispatch.prompt_tokens, self._lost_caches)
            group.prompt_tokens = min(group.prompt_tokens, dispatch.prompt_tokens)
            group.members += 1
        return _Session(group_id, dispatch.replica)

    def cache_lost(self) -> None:
        """The cache epoch of a replica has grown, or a replica was added."""
        self._lost_caches += 1
        self._alone.clear()

    def grow(self, dispatch: Dispatch, generated: int) -> None:
        """The trajectory's replica has `generated` further tokens of it in its cache."""
        session = self._sessions.get(dispatch.session_id)
        if session is not None and session.replica is dispatch.replica:
            session.tokens = dispatch.prompt_tokens + generated

    def forget(self, session_id: str) -> None:
        """A trajectory has ended; the last of a group takes the group along."""
        session = self._sessions.pop(session_id, None)
        if session is None or not session.group_id:
            return
        group = self._groups[session.group_id]
        group.members -= 1
        if group.members == 0:
            del self._groups[session.group_id]
