"""One trajectory as its clients see it: calls in, completions out, in the trajectory's scope."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from rollout.agents.long_texts import is_long, room_beside, run_text
from rollout.agents.turn import StopStrings
from rollout.bridge import wait_future
from rollout.engine.pool.generation import Generation
from rollout.errors import AgentError, EngineError, LimitExceeded, TemplateError
from rollout.gateway.answers import echo, make_answer, make_turn
from rollout.gateway.calls import (
    ID_LENGTH,
    Completion,
    GatewayCall,
    GatewayError,
    refuse_ended,
    refuse_messages,
)
from rollout.gateway.length_errors import LengthRefusals
from rollout.gateway.message_keys import mint_id
from rollout.gateway.replies import Replies, Reply
from rollout.gateway.rows import Rows
from rollout.gateway.sampling import sample_call
from rollout.gateway.task_runner import LoopBlockedError, TaskRunner
from rollout.gateway.template_messages import convert_observation, prepare_conversation
from rollout.gateway.turn_index import TurnIndex
from rollout.scopes import find_propagating, open_task_group, unwrap_group
from rollout.seeds import derive_seed
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anyio.abc import TaskGroup

    from rollout.agents import AgentContext
    from rollout.config import GatewayConfig
    from rollout.engine.core import SamplingParams
    from rollout.gateway.calls import Answer
    from rollout.gateway.task_runner import Wait
    from rollout.gateway.turn_index import Request, Turn

T = TypeVar("T")


class _Sample:
    """A turn that a call asked for, in its place."""

    def __init__(self, conversation: AgentContext, seed: int, answer_id: str) -> None:
        self.conversation = conversation
        self.start = len(conversation.transcript)
        self.answer: Answer | None = None
        self.turn: Turn | None = None
        self.cached_tokens = 0
        self._seed = seed
        self._answer_id = answer_id

    async def generate(self, call: GatewayCall, sampling: SamplingParams) -> None:
        """Have the model generate the turn. Cancelled, its tokens stay at the end of the row."""
        conversation, generations = self.conversation, list[Generation]()
        conversation.sampling = sampling
        conversation.on_tokens = [generations.append]
        decode = conversation.services.template.decode
        stop = StopStrings(call.stop, decode) if call.stop else None
        try:
            turn = await conversation.generate(stop_strings=stop, seed=self._seed)
        finally:
            conversation.on_tokens = []
        if conversation.state.log is not None:  # a resumed program gets the same again
            await conversation.state.log.wait_written()
        self.answer = make_answer(
            turn,
            call,
            generations[-1],
            answer_id=self._answer_id,
            stop_string=None if stop is None else stop.found,
        )
        self.turn = make_turn(turn, self.answer, call, conversation)
        self.cached_tokens = generations[-1].cached_tokens


@asynccontextmanager
async def open_session(
    context: AgentContext, config: GatewayConfig, path: str | None = None
) -> AsyncIterator[GatewaySession]:
    """Serve a trajectory while the block runs, in the task that enters it.

    Calls run in a task group of the block's. At its end they are cancelled, and later ones get a
    final error.

    Args:
        context: The trajectory's.
        config: How it is served.
        path: What names it in URLs; None makes one up.

    Raises:
        Exception: An engine failed, or something in here: in place of what the block makes of
            that.
        LimitExceeded: The block raised what a refusal for a length made of its client.
    """
    try:
        async with open_task_group() as tasks:
            session = GatewaySession(path or secrets.token_urlsafe(12), config, context, tasks)
            yield session
    except BaseException as error:
        if find_propagating(error) is not None:
            raise
        if session.failure is None:
            session.lengths.raise_refusal(error)
            raise
    finally:
        session.exclude_unread_rows()
    if session.failure is not None:
        raise session.failure


class GatewaySession:
    """The calls of one trajectory.

    Calls may come from any thread; each runs in the task group that the session is opened with.
    Until its turns are in rows, a call has the trajectory to itself; then it generates beside
    others.

    Attributes:
        path: What names it.
        failure: What ended it that was not its client's fault: its trajectory fails with it.
        lengths: What calls were refused for where that is a length: its trajectory ends with it
            where the client does not know how to continue.
    """

    def __init__(
        self, path: str, config: GatewayConfig, context: AgentContext, tasks: TaskGroup
    ) -> None:
        self.path = path
        self.failure: Exception | None = None
        self.lengths = LengthRefusals(path)
        self._config = config
        self._context = context
        self._runner = TaskRunner(tasks)
        limits = context.services.config.limits
        bounds = (limits.generation_s, limits.turn_s, limits.trajectory_s)
        #: How long the agent may keep the loop from its own request.
        self._begin_s = min((bound for bound in bounds if bound is not None), default=math.inf)
        self._lock = anyio.Lock(fast_acquire=True)
        self._index = TurnIndex(is_reasoning_needed=config.dropped_reasoning == "fork")
        self._rows = Rows(context, config)
        self._replies = Replies()
        self._generating = 0
        self._calls = 0
        self._siblings = Counter[tuple[int, int]]()
        self._answered: set[AgentContext] = set()
        self._cut: set[AgentContext] = set()
        context.history = "append_only"  # clients render nothing

    def exclude_unread_rows(self) -> None:
        """Rows that have no whole answer, since all clients left, are not trained on."""
        for conversation in self._cut - self._answered:
            conversation.trainable = False

    async def complete(self, call: GatewayCall, wait: Wait[Completion] = wait_future) -> Completion:
        """Generate what a client asks for, or replay what it asked for before and did not get.

        Runs in the trajectory's scope. Cancelling the caller, or an error of `wait`, means that the
        client has left: the generation is aborted.

        Raises:
            GatewayError: It cannot be served, or the trajectory has ended.
        """
        reply: Reply | None = None

        async def answer(task: anyio.TaskHandle[None]) -> Completion:
            nonlocal reply
            reply = await self._answer(call, task)
            return reply.build()

        try:
            return await self._run(answer, call.field, wait)
        except BaseException:
            if reply is not None:  # the caller left as it came
                reply.is_lost = True
            raise

    async def count_tokens(self, call: GatewayCall) -> int:
        """How many tokens the model would read; nothing is generated.

        Raises:
            GatewayError: It cannot be rendered, or the trajectory has ended.
        """

        services, tools = self._context.services, call.tools

        async def count(_: object) -> int:
            request = self._index.match(call)
            try:
                if request.turn is not None and request.is_answerable:
                    return await self._count_continued(request, request.turn)
            except TemplateError:  # it cannot write these there
                pass
            try:
                messages: Any = await prepare_conversation(services, request)
                return await run_text(
                    services.texts,
                    is_long(messages, room_beside(tools)),
                    lambda: len(services.template.prompt_ids(messages, tools or None)),
                )
            except TemplateError as error:
                raise refuse_messages(call, error) from error

        return await self._run(count, call.field)

    async def _count_continued(self, request: Request, turn: Turn) -> int:
        """The tokens of the transcript that a request continues, and of what follows there."""
        services, transcript = self._context.services, turn.conversation.transcript
        last = transcript.prefix.slice(max(0, turn.stop - 64), turn.stop)
        before = [each.medium for each in transcript.media if each.start < turn.stop]
        messages: Any = convert_observation(request.rest, turn)
        messages = await services.media.prepare(messages, len(before))

        def count() -> int:
            return len(services.template.observation_ids(messages, after=last, before=before))

        return turn.stop + await run_text(services.texts, is_long(messages), count)

    def mark_lost(self, completion_id: str) -> None:
        """The client left before it had all of an answer; also where that shows later."""
        self._runner.call_soon(partial(self._replies.mark_lost, completion_id))

    def _check_open(self) -> None:
        if self.failure is not None:
            raise refuse_ended()
        ending = self._context.state.ending
        if ending is not None:
            raise refuse_ended(f"the trajectory has ended: {ending.outcome} ({ending.reason})")

    async def _run(
        self,
        function: Callable[[anyio.TaskHandle[None]], Awaitable[T]],
        field: str,
        wait: Wait[T] = wait_future,
    ) -> T:
        """The result of a function that runs in the trajectory's task group."""

        async def run(task: anyio.TaskHandle[None]) -> T:
            self._check_open()
            try:
                return await function(task)
            except GatewayError:
                raise
            except Exception as error:
                raise self._refuse(error, field) from error

        try:
            activity = str(self._context.identity)
            return await self._runner.run(run, wait=wait, begin_s=self._begin_s, activity=activity)
        except LoopBlockedError as error:
            self.failure = self.failure or AgentError(str(error))
            raise

    def _refuse(self, error: Exception, field: str) -> GatewayError:
        """What the client of a call gets that raised."""
        if isinstance(error, LimitExceeded):
            if error.outcome is not Outcome.LENGTH:
                return refuse_ended(f"the trajectory has ended: {error}")
            self.lengths.add(error)
            return GatewayError(400, "context_length", str(error), field)
        self.failure = self.failure or error
        what = str(error) if isinstance(error, EngineError) else "internal error"
        return GatewayError(400, "engine", what)

    async def _answer(self, call: GatewayCall, task: anyio.TaskHandle[None]) -> Reply:
        reply = self._replies.find(call.digest, is_retry=call.is_retry)
        if reply is not None:
            return reply
        most = self._config.max_concurrent_calls
        if self._generating >= most:
            limit = f"gateway.max_concurrent_calls = {most}"
            raise GatewayError(403, "limit", f"{limit}: as many calls are being answered")
        self._generating += 1
        samples: list[_Sample] = []
        try:
            served, sampling = sample_call(self._context, call, self._config.sampling)
            is_pinned, call = served is not call, served
            async with self._lock:
                request = self._index.match(call)
                await self._open_turns(request, samples)
            self._context.state.pinned_calls += is_pinned
            await self._generate(call, sampling, samples)
        finally:
            self._generating -= 1
            for sample in samples:
                if sample.answer is None and len(sample.conversation.transcript) == sample.start:
                    self._rows.release(request, sample.conversation)
                if sample.answer is None or task.status is task.Status.CANCELLING:
                    self._cut.add(sample.conversation)
        return self._finish(request, samples)

    async def _open_turns(self, request: Request, samples: list[_Sample]) -> None:
        """Open a turn for each sample, in the order of their numbers."""
        call, most = request.call, self._config.max_calls
        if most is not None and self._calls >= most:
            source = "gateway.max_calls"
            self._context.end(Outcome.LIMIT, "calls", limit_source=source)
            message = f"{source} = {most}: as many requests have generated"
            raise GatewayError(403, "limit", message)
        for number in range(call.n):
            self._context.check_turns()  # before a row is opened for it
            conversation = await self._rows.open_turn(request)
            samples.append(_Sample(conversation, *self._seed(conversation, call, number)))
            self._calls += number == 0

    def _seed(self, conversation: AgentContext, call: GatewayCall, number: int) -> tuple[int, str]:
        """The seed of a turn that begins now, and the id of its answer.

        They come from the tokens before it and from how many turns were asked for after the same
        tokens, so that they are the same in every run. Where a call brings a seed, the same seed
        gives the same turn after the same tokens, another one in each member of a group.
        """
        prefix, identity = conversation.transcript.prefix, self._context.identity
        position = (len(prefix), prefix.compute_sum())
        sibling = self._siblings[position]
        self._siblings[position] += 1
        ends = (sibling,) if call.seed is None else ("client", call.seed, number)
        member = (identity.step, identity.uid, identity.member)
        seed = derive_seed(identity.run_seed, *member, *position, *ends)
        names = ("answer", identity.session_id, *position, sibling)
        return seed, mint_id(*names, length=ID_LENGTH)

    async def _generate(
        self, call: GatewayCall, sampling: SamplingParams, samples: list[_Sample]
    ) -> None:
        if len(samples) == 1:
            await samples[0].generate(call, sampling)
            return
        try:
            async with anyio.create_task_group() as tasks:
                for sample in samples:
                    tasks.start_soon(sample.generate, call, sampling)
        except BaseExceptionGroup as group:
            raise unwrap_group(group) from None

    def _finish(self, request: Request, samples: list[_Sample]) -> Reply:
        """The samples are turns of the index from now on."""
        answers, turns = [], []
        for sample in samples:
            assert sample.answer is not None
            assert sample.turn is not None
            self._index.add(request, sample.turn)
            self._answered.add(sample.conversation)
            answers.append(sample.answer)
            turns.append(sample.turn)
        first = samples[0]
        completion_id = mint_id("completion", answers[0].id, length=ID_LENGTH)
        if request.call.api == "responses":
            self._index.remember(completion_id, request, echo(answers[0], request.call))
        prefix = first.conversation.transcript.prefix

        def build() -> Completion:
            return Completion(
                id=completion_id,
                answers=tuple(answers),
                prompt_ids=prefix.slice(0, first.start),
                cached_tokens=first.cached_tokens,
            )

        digest = request.call.digest
        reply = Reply(digest=digest, id=completion_id, build=build, turns=turns)
        self._replies.add(reply)
        return reply
