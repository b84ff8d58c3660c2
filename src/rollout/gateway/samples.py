"""One turn that a call asked for: generated, cut where its client leaves, and continued."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.agents.turn_options import StopStrings, TurnOptions
from rollout.gateway.answers import Told, told

if TYPE_CHECKING:
    from rollout.agents import AssistantTurn, Conversation
    from rollout.engine.core import SamplingParams
    from rollout.engine.pool.generation import Generation
    from rollout.gateway.placing import Places
    from rollout.gateway.request import Request
    from rollout.gateway.seeding import Seeding


class Sample:
    """A turn on its way.

    Attributes:
        request: The call, matched.
        told: What the client is told; None until the turn is whole.
        conversation: Whose turn it is; None until it has its place.
        start: Where the turn begins.
        generations: What it is made of: one, unless it was cut and continued.
        cached_tokens: Of what the model read before it, what needed no prefill.
    """

    def __init__(self, request: Request, number: int, sampling: SamplingParams) -> None:
        self.told: Told | None = None
        self.conversation: Conversation | None = None
        self.start = 0
        self.generations: list[Generation] = []
        self.cached_tokens = 0
        self.request = request
        self._number = number
        self._sampling = sampling
        self._seed = 0
        self._answer_id = ""
        self._stop: StopStrings | None = None

    @property
    def answer_id(self) -> str:
        """Of its answer; "" until it has its place."""
        return self._answer_id

    async def take_place(self, places: Places, seeding: Seeding) -> None:
        """Have a place for the turn, and its seed, unless it has them.

        Args:
            places, seeding: Of its trajectory.
        """
        if self.conversation is None:
            self.conversation = await places.take(self.request)
            self.start = len(self.conversation.transcript)
            self._seed, self._answer_id = seeding.of(
                self.conversation, self.request.call, self._number
            )

    async def run(self) -> None:
        """Generate what is missing of the turn, which has its place.

        Cancelled, the tokens stay with the conversation, and the next run continues from them.
        """
        assert self.conversation is not None
        turn = self._whole(self.conversation) or await self._generate(self.conversation)
        await self.conversation.until_kept()  # what a program was told is told it again
        self.told = self._tell(turn, self.conversation)

    def _whole(self, conversation: Conversation) -> AssistantTurn | None:
        """The turn, where it was whole before the wait for it was cancelled."""
        if conversation.open_turn is not None or len(conversation.transcript) == self.start:
            return None
        return conversation.messages.turn(len(conversation.messages) - 1)

    async def _generate(self, conversation: Conversation) -> AssistantTurn:
        said = conversation.open_turn or ()
        bounds = (self._sampling.max_new_tokens, conversation.wording.turn_room)
        most = min(bound for bound in bounds if bound is not None) - len(said)
        stops = self.request.call.stop
        self._stop = (
            StopStrings(stops, conversation.wording.template.decode, said) if stops else None
        )
        conversation.sampling = msgspec.structs.replace(self._sampling, max_new_tokens=max(1, most))
        conversation.on_tokens = [self._note]
        try:
            options = TurnOptions(seed=self._seed, stop=self._stop, stays_open=True)
            return await conversation.generate(options)
        finally:
            conversation.on_tokens = []

    def _note(self, generation: Generation) -> None:
        if not self.generations or self.generations[-1] is not generation:
            self.generations.append(generation)

    def _tell(self, turn: AssistantTurn, conversation: Conversation) -> Told:
        stop_string, text, cut_by = None, turn.text, turn.cut_by
        if self._stop is not None and self._stop.found is not None:
            stop_string, text, cut_by = self._stop.found, self._stop.before(text), None
            reader = conversation.wording.reader
            turn = reader.read(text, cut_by, in_reasoning=conversation.in_reasoning)
        found = told(
            turn,
            self.request.call,
            conversation,
            self.generations,
            answer_id=self._answer_id,
            stop_string=stop_string,
        )
        self.cached_tokens = self.generations[0].cached_tokens
        self.generations = []
        return found
