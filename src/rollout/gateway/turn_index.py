"""Finds the turn that a request continues: a dictionary of cumulative keys of messages.

The key of a conversation is the hash of who speaks in it, of its tools, and of the contents of its
messages so far. A generated turn is entered under the key of the conversation that ends with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import attrs

from rollout.agents import AgentContext
from rollout.errors import TemplateError
from rollout.gateway.calls import (
    ID_LENGTH,
    ClientMessage,
    GatewayCall,
    GatewayError,
    refuse_messages,
)
from rollout.gateway.message_keys import (
    MessageKey,
    OrderedMessage,
    hash_message,
    hash_tools,
    order_results,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@attrs.define(eq=False, kw_only=True)
class Turn:
    """A generated turn: where its tokens are, and what clients may know it by.

    Attributes:
        conversation: Whose transcript has the tokens.
        stop: Where they end there.
        content: Key of what its client was sent.
        reasoning: Key of its reasoning; None where there is none.
        ids: Minted for it: the answer's, its calls'.
        calls: Of each call its name and the id that the model gave it, "" where it gave none.
        sent_calls: How many of these calls the client was sent.
        parent: The generated turn that its request continued.
        depth: Messages up to it and with it.
        foreign: Keys of the reasoning of messages between its parent and it that are an
            assistant's and were not generated here, by their positions.
    """

    conversation: AgentContext
    stop: int
    content: int
    reasoning: int | None = None
    ids: frozenset[str] = frozenset()
    calls: Sequence[tuple[str, str]] = ()
    sent_calls: int = 0
    parent: Turn | None = None
    depth: int = 0
    foreign: dict[int, int | None] = attrs.field(factory=dict)

    @property
    def is_extended(self) -> bool:
        """Whether something follows it in its transcript."""
        return len(self.conversation.transcript) > self.stop

    def line(self) -> Iterator[Turn]:
        """It and the turns before it, the last first."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent


@attrs.frozen(eq=False, kw_only=True)
class Request:
    """A call, matched.

    Attributes:
        call: As the client made it.
        messages: The conversation.
        keys: Of the messages.
        key: Of the conversation.
        turn: The deepest generated turn that it continues; None where there is none.
    """

    call: GatewayCall
    messages: list[OrderedMessage]
    keys: list[MessageKey]
    key: int
    turn: Turn | None

    @property
    def depth(self) -> int:
        """How many of its messages are up to that turn."""
        return 0 if self.turn is None else self.turn.depth

    @property
    def rest(self) -> list[OrderedMessage]:
        """The messages after that turn."""
        return self.messages[self.depth :]

    @property
    def is_answerable(self) -> bool:
        """Whether it adds messages to a generated turn, and none of the assistant."""
        roles = {each.message.role for each in self.rest}
        return self.turn is not None and bool(roles) and "assistant" not in roles

    @property
    def start_key(self) -> tuple[object, ...]:
        """The same for requests for another sample of the same turn."""
        return self.key, self.turn, *(key.reasoning for key in self.keys[self.depth :])


class TurnIndex:
    """The generated turns of one trajectory.

    Args:
        is_reasoning_needed: Whether a turn that comes back without its reasoning is another one.
    """

    def __init__(self, *, is_reasoning_needed: bool) -> None:
        self._is_reasoning_needed = is_reasoning_needed
        self._turns: dict[int, list[Turn]] = {}
        #: Of the Responses API, the conversation that each answer ends, by completion id.
        self._answered: dict[str, list[ClientMessage]] = {}

    def match(self, call: GatewayCall) -> Request:
        """Find the turn that a call continues."""
        messages = self._join(call)
        if not messages:
            raise GatewayError(400, "invalid_request", "expected at least one message", call.field)
        try:
            ordered = order_results(messages)
        except TemplateError as error:
            raise refuse_messages(call, error) from error
        keys = [hash_message(*each) for each in ordered]
        root = hash((call.agent_id, call.is_side, hash_tools(call.tools)))
        path = list(accumulate(keys, lambda key, each: hash((key, each.content)), initial=root))
        turn = self._find(path, keys)
        return Request(call=call, messages=ordered, keys=keys, key=path[-1], turn=turn)

    def add(self, request: Request, turn: Turn) -> None:
        """A turn was generated for a request."""
        turn.parent, turn.depth = request.turn, len(request.messages) + 1
        turn.foreign = {
            at: key.reasoning
            for at, key in enumerate(request.keys)
            if key.is_turn and at >= request.depth
        }
        self._turns.setdefault(hash((request.key, turn.content)), []).append(turn)

    def remember(self, completion_id: str, request: Request, answer: ClientMessage) -> None:
        """Later calls may name this answer in place of repeating its conversation."""
        messages = [each.message for each in request.messages]
        self._answered[completion_id] = [*messages, answer]

    def _find(self, path: Sequence[int], keys: Sequence[MessageKey]) -> Turn | None:
        """The deepest turn; of several, the one that most minted ids of the request speak for.

        Without ids, one that nothing follows comes first.
        """
        ids = {each[-ID_LENGTH:] for key in keys for each in key.ids}

        def prefer(turn: Turn) -> tuple[int, bool]:
            return sum(len(each.ids & ids) for each in turn.line()), not turn.is_extended

        for depth in range(len(keys), 0, -1):
            if keys[depth - 1].is_turn:
                turns = [t for t in self._turns.get(path[depth], ()) if self._agrees(t, keys)]
                if turns:
                    return max(turns, key=prefer)
        return None

    def _agrees(self, turn: Turn, keys: Sequence[MessageKey]) -> bool:
        """Whether the reasoning in a request is that of a turn and of those before it."""
        for each in turn.line():
            reasoning = keys[each.depth - 1].reasoning
            is_dropped = reasoning is None and not self._is_reasoning_needed
            if reasoning != each.reasoning and not is_dropped:
                return False
            if any(keys[at].reasoning != key for at, key in each.foreign.items()):
                return False
        return True

    def _join(self, call: GatewayCall) -> Sequence[ClientMessage]:
        """The conversation up to the answer that a call names, then what is new.

        Instructions of its own replace those before.
        """
        if call.previous_id is None:
            return call.messages
        before = self._answered.get(call.previous_id)
        if before is None:
            message = f"there is no answer {call.previous_id!r:.80}"
            raise GatewayError(404, "not_found", message, "previous_response_id")
        new = call.messages
        own = [each for each in new[:1] if each.is_instructions]
        earlier = before[1:] if own and before[0].is_instructions else before
        return [*own, *earlier, *new[len(own) :]]
