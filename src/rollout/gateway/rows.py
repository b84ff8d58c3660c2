"""Where a call's turn is generated: at the end of a row, on a branch, or in a row of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.chat.trajectory import BRANCH, SIDE, SUBAGENT
from rollout.errors import AgentError, TemplateError
from rollout.gateway.calls import GatewayError, refuse_messages
from rollout.gateway.template_messages import convert_observation, prepare_conversation
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.agents import AgentContext
    from rollout.config import GatewayConfig
    from rollout.gateway.turn_index import Request, Turn


class Rows:
    """Finds or opens the row of each call's turn in one trajectory.

    Its caller holds the trajectory's lock.
    """

    def __init__(self, context: AgentContext, config: GatewayConfig) -> None:
        self._context = context
        self._config = config
        self._opened = 0
        #: Where the first of several equal turns begins; further ones branch there.
        self._starts: dict[tuple[object, ...], tuple[AgentContext, int]] = {}
        #: Rows that wait for another try, since their turn got no token.
        self._unused: dict[tuple[object, ...], list[AgentContext]] = {}

    async def open_turn(self, request: Request) -> AgentContext:
        """A conversation whose next turn is the one that is requested, and nobody else's.

        Raises:
            LimitExceeded: There is no room.
            GatewayError: The messages cannot be rendered, or there are too many rows.
        """
        unused = self._unused.get(request.start_key)
        if unused:
            return unused.pop()
        start = self._starts.get(request.start_key)
        if start is not None:
            return await self._branch(request, *start)
        opened = await self._open(request)
        self._starts[request.start_key] = opened, len(opened.transcript)
        return opened

    def release(self, request: Request, conversation: AgentContext) -> None:
        """A turn got no token: the next equal one is generated there."""
        self._unused.setdefault(request.start_key, []).append(conversation)

    async def _open(self, request: Request) -> AgentContext:
        turn = request.turn
        if turn is not None and request.is_answerable:
            try:
                return await self._continue(request, turn)
            except TemplateError:  # it cannot write these there: all is rendered again
                pass
        try:
            return await self._render(request)
        except (AgentError, TemplateError) as error:
            raise refuse_messages(request.call, error) from error

    async def _continue(self, request: Request, turn: Turn) -> AgentContext:
        """What follows a generated turn: in its row where nothing else does, else on a branch."""
        messages: Any = convert_observation(request.rest, turn)
        if turn.is_extended:
            return await self._branch(request, turn.conversation, turn.stop, messages)
        await turn.conversation.answer(messages, is_ordered=True)
        return turn.conversation

    async def _branch(
        self, request: Request, row: AgentContext, position: int, messages: Any = None
    ) -> AgentContext:
        purpose = self._begin_row(request)
        branch = await row.branch(position, purpose=purpose, messages=messages, is_ordered=True)
        return self._note_row(branch, request)

    async def _render(self, request: Request) -> AgentContext:
        """The conversation from its beginning."""
        context, call = self._context, request.call
        messages: Any = await prepare_conversation(context.services, request)
        if not context.transcript and not call.is_side and call.agent_id is None:
            await context.begin_with(messages, tools=call.tools)
            return context
        purpose = self._begin_row(request, SUBAGENT if call.agent_id is not None else BRANCH)
        parent = context if request.turn is None else request.turn.conversation
        opened = await parent.subagent(messages, purpose=purpose, tools=call.tools)
        return self._note_row(opened, request)

    def _begin_row(self, request: Request, purpose: str = BRANCH) -> str:
        """The purpose of one row more; refused where there are as many as are allowed."""
        most = self._config.max_branches
        if most is not None and self._opened >= most:
            limit = "gateway.max_branches"
            self._context.end(Outcome.LIMIT, "branches", limit_source=limit)
            message = f"{limit} = {most}: the trajectory has as many rows beside its main one"
            raise GatewayError(403, "limit", message)
        return SIDE if request.call.is_side else purpose

    def _note_row(self, opened: AgentContext, request: Request) -> AgentContext:
        self._opened += 1
        if request.call.is_side and not self._config.train_side_calls:
            opened.trainable = False
        return opened
