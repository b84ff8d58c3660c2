"""Which replica has which prefix in its cache: of a trajectory, and of a group's shared prompt."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from rollout.engine.routing.replicas import ReplicaState

if TYPE_CHECKING:
    from rollout.engine.routing.replicas import Dispatch

#: Holders of a group's prompt that are remembered, the latest: more of them decide nothing.
MAX_HOLDERS = 8
#: Trajectories that are remembered; a later turn of an older one is placed like a first one.
MAX_SESSIONS = 100_000


class _Group(msgspec.Struct, eq=False):
    """Trajectories with one prompt."""

    prompt_tokens: int  # of the shortest prompt that one of them began with
    #: Where trajectories began or moved last, with the epoch of the cache that got the prompt.
    holders: dict[ReplicaState, int] = msgspec.field(default_factory=dict)
    members: int = 0  # that are remembered


class _Session(msgspec.Struct, eq=False, gc=False):
    group_id: str
    replica: ReplicaState
    cache_epoch: int = 0
    tokens: int = 0

    @property
    def is_warm(self) -> bool:
        """Whether its replica still has its prefix."""
        return self.replica.is_offered and self.cache_epoch == self.replica.cache_epoch


class Sessions:
    """The trajectories and groups that have been seen and not been forgotten."""

    def __init__(self) -> None:
        #: In the order of their last requests.
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def group_count(self) -> int:
        """Groups of which a trajectory is remembered."""
        return len(self._groups)

    def recall(self, dispatch: Dispatch, group_id: str) -> None:
        """Fill in where the trajectory was last, and which replicas have its prefix."""
        session = self._sessions.get(dispatch.session_id)
        if session is not None and session.replica.is_offered:
            dispatch.pinned = session.replica
            if session.is_warm:
                dispatch.warm_tokens = min(session.tokens, dispatch.prompt_tokens)
        group, trunk = self._groups.get(group_id), self._sessions.get(group_id)
        if group is not None:
            dispatch.shared_tokens = min(group.prompt_tokens, dispatch.prompt_tokens)
            dispatch.holders = [
                replica for replica, epoch in group.holders.items() if epoch == replica.cache_epoch
            ]
        elif trunk is not None:  # a branch of a trajectory that is in no group
            dispatch.shared_tokens = min(trunk.tokens, dispatch.prompt_tokens)
            dispatch.holders = [trunk.replica] if trunk.is_warm else []

    def note(self, dispatch: Dispatch, group_id: str) -> None:
        """Remember where a request went."""
        session = self._sessions.get(dispatch.session_id)
        if session is None:
            session = self._sessions[dispatch.session_id] = _Session(group_id, dispatch.replica)
            if group_id:
                tokens = dispatch.prompt_tokens
                group = self._groups.setdefault(group_id, _Group(tokens))
                group.prompt_tokens = min(group.prompt_tokens, tokens)
                group.members += 1
            if len(self._sessions) > MAX_SESSIONS:
                self.forget(next(iter(self._sessions)))
        else:
            self._sessions.move_to_end(dispatch.session_id)
        replica = session.replica = dispatch.replica
        session.cache_epoch = replica.cache_epoch
        session.tokens = dispatch.prompt_tokens
        if session.group_id and not (replica is dispatch.pinned and dispatch.warm_tokens):
            holders = self._groups[session.group_id].holders
            holders.pop(replica, None)
            holders[replica] = replica.cache_epoch
            if len(holders) > MAX_HOLDERS:
                del holders[next(iter(holders))]

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
