"""Seeds and ids of generated turns: the same in every run, whatever order calls arrive in."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rollout.gateway.answers import minted
from rollout.seeds import derive_seed

if TYPE_CHECKING:
    from rollout.agents import Conversation
    from rollout.agents.identity import Identity
    from rollout.gateway.calls import GatewayCall


class Seeding:
    """Of one trajectory. A turn's seed comes from the tokens before it, and from how many turns
    were asked for after the same tokens; or from the seed that its client sent.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._siblings: Counter[tuple[int, int]] = Counter()

    def of(self, conversation: Conversation, call: GatewayCall, number: int) -> tuple[int, str]:
        """The seed of a turn that begins now, and the id of its answer.

        Args:
            conversation: Its transcript ends where the turn begins.
            call: Where it brings a seed, the same seed gives the same turn after the same tokens,
                in this trajectory and whenever the run is repeated.
            number: Of the call's samples, counted from 0.
        """
        prefix = conversation.transcript.prefix
        place = (len(prefix), prefix.compute_sum(len(prefix)) or 0)
        sibling = self._siblings[place]
        self._siblings[place] += 1
        identity = self._identity
        member = (identity.step, identity.uid, identity.member, *place)
        if call.seed is None:
            seed = derive_seed(identity.run_seed, *member, sibling)
        else:  # engines draw the same from the same, and members of a group are to differ
            seed = derive_seed(identity.run_seed, *member, "client", call.seed, number)
        return seed, minted("answer", identity.session_id, *place, sibling)
