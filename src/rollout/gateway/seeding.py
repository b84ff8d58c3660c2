"""Seeds and ids of generated turns: the same in every run, whatever order calls arrive in."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rollout.gateway.answers import minted
from rollout.seeds import SEED_BITS, derive_seed

if TYPE_CHECKING:
    from rollout.agents import Conversation
    from rollout.agents.identity import Identity
    from rollout.gateway.calls import GatewayCall


class Seeding:
    """Of one trajectory. A turn's seed comes from the tokens before it, and from how many turns
    were asked for after the same tokens.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._siblings: Counter[tuple[int, int]] = Counter()

    def of(self, conversation: Conversation, call: GatewayCall, number: int) -> tuple[int, str]:
        """The seed of a turn that begins now, and the id of its answer.

        Args:
            conversation: Its transcript ends where the turn begins.
            call: May bring a seed: its first sample has it as it is.
            number: Of the call's samples, counted from 0.
        """
        prefix = conversation.transcript.prefix
        place = (len(prefix), prefix.sum_of(len(prefix)) or 0)
        sibling = self._siblings[place]
        self._siblings[place] += 1
        identity = self._identity
        seed = derive_seed(
            identity.run_seed, identity.step, identity.uid, identity.member, *place, sibling
        )
        answer_id = minted("answer", identity.session_id, *place, sibling)
        if call.seed is not None:
            seed = _given(call.seed, number)
        return seed, answer_id


def _given(seed: int, number: int) -> int:
    """A client's; further samples have others, since engines draw the same from the same."""
    if number == 0 and 0 <= seed < 2**SEED_BITS:
        return seed
    return derive_seed(seed, "sample", number)
