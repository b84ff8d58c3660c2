"""Where a call's turn is generated: at the tip of a row, on a branch, or in a row of its own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

from rollout.chat.trajectory import BRANCH, COMPACTION, SIDE, SUBAGENT
from rollout.errors import AgentError, TemplateError
from rollout.gateway.calls import GatewayError, refused_messages
from rollout.gateway.tree import MAIN_AGENT
from rollout.gateway.wording import accepted, conversation, is_plain, observation
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.agents import AgentContext, Conversation
    from rollout.gateway.request import Request, Shape
    from rollout.gateway.settings import GatewaySettings
    from rollout.gateway.tree import Turn


#: A text of fewer is no sum of a conversation.
SUMMARY_CHARS = 16


class Place:
    """Where the turns after a node begin: known once the first of them has its tokens.

    Attributes:
        conversation, position: None and 0 until then.
        settled: Set when it is known, or will not be.
    """

    def __init__(self) -> None:
        self.conversation: Conversation | None = None
        self.position = 0
        self.settled = anyio.Event()


class Places:
    """Finds or makes the place of each call's turn in one trajectory."""

    def __init__(self, context: AgentContext, settings: GatewaySettings) -> None:
        self._context = context
        self._settings = settings
        self._main: Shape | None = None
        self._opened = 0
        #: Calls of the main agent that generate at the moment.
        self.main_calls = 0

    def is_of_main(self, request: Request) -> bool:
        """Whether it is a call of the main agent."""
        call, main = request.call, self._main
        if call.asker != MAIN_AGENT:
            return False
        return main is None or (main.tools, main.system) == (
            request.shape.tools,
            request.shape.system,
        )

    async def take(self, request: Request) -> Conversation:
        """A conversation whose next turn is the one that was asked for, and nobody else's.

        The first of an asker's at a node has what the client gave rendered; others branch there.

        Raises:
            LimitExceeded: There is no room.
            GatewayError: The messages cannot be rendered, or there are too many rows.
        """
        places, asker = request.found.node.places, request.call.asker
        while True:
            place: Place | None = places.get(asker)
            if place is None:
                return await self._first(request)
            if place.conversation is not None:
                with self._one_more():
                    return self._marked(
                        await place.conversation.branch(
                            place.position, purpose=_purpose(request, BRANCH)
                        ),
                        request,
                    )
            await place.settled.wait()

    async def _first(self, request: Request) -> Conversation:
        places, asker = request.found.node.places, request.call.asker
        places[asker] = place = Place()
        try:
            opened = await self._open(request)
        except BaseException:
            del places[asker]
            raise
        else:
            place.conversation, place.position = opened, len(opened.transcript)
            return opened
        finally:
            place.settled.set()

    async def _open(self, request: Request) -> Conversation:
        turn, rest = request.found.said.turn, request.rest
        if turn is not None and rest and all(m.role != "assistant" for m, _ in rest):
            try:
                return await self._continued(request, turn)
            except TemplateError:  # it cannot write these there: all is rendered again
                pass
        return await self._rendered(request, turn)

    async def _continued(self, request: Request, turn: Turn) -> Conversation:
        """What follows a generated turn: in its row where nothing else does, else on a branch.

        Another one's turn is not continued in its row: it continues that itself.
        """
        owner: Conversation = turn.conversation
        messages, call = observation(request.rest, turn), request.call
        is_own = turn.asker == call.asker
        if turn.is_extended or not is_own:
            with self._one_more():
                is_forked = call.agent_id is not None and not is_own
                purpose = _purpose(request, SUBAGENT if is_forked else BRANCH)
                branch = await owner.branch(
                    turn.stop, purpose=purpose, messages=messages, is_ordered=True
                )
                return self._marked(branch, request)
        turn.is_extended = True
        try:
            await owner.answer(messages, is_ordered=True)
        finally:
            turn.is_extended = len(owner.transcript) > turn.stop
        return owner

    async def _rendered(self, request: Request, turn: Turn | None) -> Conversation:
        """The whole conversation, from its beginning."""
        context, call = self._context, request.call
        messages: Any = conversation(request.messages)
        try:
            messages = await context.services.media.prepared(messages)
            if not is_plain(messages):
                messages = accepted(messages, self._template, call.tools)
            if self._main is None and call.asker == MAIN_AGENT:
                return await self._begun(request, messages)
            with self._one_more():
                parent = context.main if turn is None else turn.conversation
                purpose = _purpose(request, self._purpose_of_new(request, turn))
                opened = await parent.subagent(messages, purpose=purpose, tools=call.tools)
                return self._marked(opened, request)
        except (AgentError, TemplateError) as error:
            raise refused_messages(call, error) from error

    async def _begun(self, request: Request, messages: Any) -> Conversation:
        """The main conversation."""
        main, self._main = self._context.main, request.shape
        try:
            await main.begin_with(messages, tools=request.call.tools)
        finally:
            if not main.transcript:
                self._main = None
        return main

    def _purpose_of_new(self, request: Request, turn: Turn | None) -> str:
        """Of a row that nothing before it leads to."""
        main, shape = self._main, request.shape
        if request.call.agent_id is not None or main is None:
            return SUBAGENT
        if turn is not None or shape.opening == main.opening:
            # The same conversation, told otherwise; some agents keep what users said beside a sum.
            is_summed = shape.tools == main.tools and self._has_summary(request)
            return COMPACTION if is_summed else BRANCH
        if (shape.tools, shape.system) != (main.tools, main.system):
            return SUBAGENT
        # The main agent begins again while nothing else of its own is under way.
        return COMPACTION if self.main_calls <= 1 else SUBAGENT

    def _has_summary(self, request: Request) -> bool:
        """Whether it has nothing of the model's but a text of its, which somebody else tells."""
        given = [message for message, _ in request.messages]
        if any(message.role == "assistant" for message in given):
            return False
        texts = [message.text for message in given[len(request.shape.opening) :]]
        said = (
            conversation.messages.turn(at).content
            for conversation in self._context.main.all()
            for at in conversation.messages.said
        )
        return any(len(sum_) >= SUMMARY_CHARS and sum_ in text for sum_ in said for text in texts)

    def _marked(self, opened: Conversation, request: Request) -> Conversation:
        if request.call.is_side and not self._settings.train_side_calls:
            opened.trainable = False
        return opened

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        """Count a row that its block opens.

        Raises:
            GatewayError: There are as many as are allowed.
        """
        most = self._settings.max_branches
        if most is not None and self._opened >= most:
            source = "gateway.max_branches"
            self._context.end(Outcome.LIMIT, "branches", limit_source=source)
            limit = f"{source} = {most}"
            message = f"{limit}: the trajectory has as many rows beside its main one"
            raise GatewayError(403, "limit", message)
        self._opened += 1
        try:
            yield
        except BaseException:
            self._opened -= 1
            raise

    @property
    def _template(self) -> Any:
        return self._context.main.wording.template


def _purpose(request: Request, otherwise: str) -> str:
    return SIDE if request.call.is_side else otherwise
