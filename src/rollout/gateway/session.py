"""One trajectory as its clients see it: calls in, completions out, in the trajectory's scope."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING

import anyio

from rollout.errors import EngineError, LimitExceeded
from rollout.gateway.answers import given_back
from rollout.gateway.call_limit import CallLimit
from rollout.gateway.calls import Completion, GatewayCall, GatewayError
from rollout.gateway.counting import count_tokens
from rollout.gateway.exchanges import Exchange, Exchanges, completion_id_of
from rollout.gateway.length_errors import LengthRefusals
from rollout.gateway.placing import Places
from rollout.gateway.request import Request, matched
from rollout.gateway.samples import Sample
from rollout.gateway.sampling import sample_call
from rollout.gateway.seeding import Seeding
from rollout.gateway.tree import Node, Tree
from rollout.scopes import unwrap_group
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyio.abc import TaskGroup

    from rollout.agents import AgentContext, Conversation
    from rollout.gateway.settings import GatewaySettings


def ended_error(why: str = "the trajectory has ended") -> GatewayError:
    """What calls get that come too late; clients do not repeat it."""
    return GatewayError(403, "trajectory_ended", why)


class _Work:
    """A call that runs in its trajectory's task group while its caller waits."""

    def __init__(self, call: GatewayCall, refusals: int) -> None:
        self.call = call
        self.refusals = refusals  # for a length, of calls before it
        self.scope = anyio.CancelScope()
        self.done = anyio.Event()
        self.exchange: Exchange | None = None
        self.token = object()  # owns the exchange
        self.has_client = True
        self.has_place = False  # among the calls that generate, unused
        self.completion: Completion | None = None
        self.error: GatewayError | None = None

    def take(self, exchange: Exchange) -> None:
        """The exchange is answered for this call from now on."""
        self.exchange, exchange.owner = exchange, self.token


class _Trajectory:
    """What is needed while it runs, and dropped at its end."""

    def __init__(self, context: AgentContext, settings: GatewaySettings, tasks: TaskGroup) -> None:
        self.context = context
        self.tasks = tasks
        self.tree = Tree(is_reasoning_needed=settings.dropped_reasoning == "fork")
        self.places = Places(context, settings)
        self.seeding = Seeding(context.identity)
        self.exchanges = Exchanges()
        self.answered: dict[str, Node] = {}  # turns by the ids of completions that hold them
        self.heard: set[Conversation] = set()  # those of which a client was told a turn
        self.calls = CallLimit(settings.max_calls)
        self.running = 0
        self.scheduler_context = copy_context()


class GatewaySession:
    """The calls of one trajectory.

    Attributes:
        path, key: What names and opens it; random.
        failure: What ended it that was not its client's fault: its trajectory fails with it.
        lengths: What calls were refused for where that is a length: its trajectory ends with it
            where the client does not know how to continue.
    """

    def __init__(self, path: str, key: str, settings: GatewaySettings) -> None:
        self.path = path
        self.key = key
        self.failure: Exception | None = None
        self.lengths = LengthRefusals(path)
        self._is_closing = False
        self._settings = settings
        self._trajectory: _Trajectory | None = None

    def begin(self, context: AgentContext, tasks: TaskGroup) -> None:
        """Answer calls, each in a task of this group."""
        context.main.history = "append_only"  # clients render nothing
        self._trajectory = _Trajectory(context, self._settings, tasks)

    def close(self) -> None:
        """Begin no more; what runs is about to be cancelled."""
        self._is_closing = True

    def end(self) -> Exception | None:
        """Answer no more; returns and forgets `failure`."""
        failure, self.failure = self.failure, None
        trajectory, self._trajectory = self._trajectory, None
        if trajectory is not None:
            _settle(trajectory)
        return failure

    async def complete(self, call: GatewayCall) -> Completion:
        """Generate what a client asks for, or replay what it asked for before and did not get.

        Runs in the trajectory's scope. Cancelling the caller says that the client has left: the
        generation is aborted, and the same call continues it.

        Raises:
            GatewayError: It cannot be served, or the trajectory has ended.
        """
        trajectory = self._running()
        work = _Work(call, self.lengths.count)
        trajectory.scheduler_context.run(trajectory.tasks.start_soon, self._serve, trajectory, work)
        try:
            await work.done.wait()
        except BaseException:
            work.has_client = False
            work.scope.cancel()
            _leave(trajectory, work)
            raise
        if work.completion is None:
            raise work.error or ended_error()
        return work.completion

    def delivered(self, completion_id: str) -> None:
        """The client has the last byte of an answer."""
        if self._trajectory is not None:
            exchange = self._trajectory.exchanges.of(completion_id)
            if exchange is not None:
                self._trajectory.exchanges.delivered(exchange)

    def left(self, completion_id: str) -> None:
        """The client left before the last byte of an answer; also where that shows later."""
        if self._trajectory is not None:
            exchange = self._trajectory.exchanges.of(completion_id)
            if exchange is not None:
                self._trajectory.exchanges.left(exchange)

    async def count_tokens(self, call: GatewayCall) -> int:
        """How many tokens the model would read; nothing is generated.

        Raises:
            GatewayError: It cannot be rendered, or the trajectory has ended.
        """
        trajectory = self._running()
        return await count_tokens(trajectory.context, self._matched(trajectory, call))

    @property
    def activity(self) -> str:
        """What the agent does, as the watchdog names it; from any thread."""
        trajectory = self._trajectory
        return "" if trajectory is None else str(trajectory.context.identity)

    def fail(self, error: Exception) -> None:
        """Its trajectory ends with this error; from any thread."""
        self.failure = self.failure or error

    def _running(self) -> _Trajectory:
        trajectory = self._trajectory
        if trajectory is None or self._is_closing or self.failure is not None:
            raise ended_error()
        ending = trajectory.context.ending
        if ending is not None:
            raise ended_error(f"the trajectory has ended: {ending.outcome} ({ending.reason})")
        return trajectory

    async def _serve(self, trajectory: _Trajectory, work: _Work) -> None:
        """One call from its beginning to its end, whatever that is."""
        try:
            with work.scope:
                await self._answer(trajectory, work)
        except GatewayError as error:
            work.error = error
        except LimitExceeded as error:
            work.error = _limit_error(error, work.call.field)
            if error.outcome is Outcome.LENGTH:
                work.error.__cause__ = error
                self.lengths.add(error)
        except Exception as error:
            self.failure = self.failure or error
            what = str(error) if isinstance(error, EngineError) else "internal error"
            work.error = GatewayError(400, "engine", what)
        finally:
            if work.exchange is not None and work.error is not None:
                trajectory.exchanges.failed(work.exchange)
            elif not work.has_client:
                _leave(trajectory, work)
            work.done.set()

    async def _answer(self, trajectory: _Trajectory, work: _Work) -> None:
        call, exchange = work.call, None
        if call.digest:
            exchange = await trajectory.exchanges.claim(call.digest, is_retry=call.is_retry)
        if exchange is not None:
            work.take(exchange)
        if exchange is None or not exchange.is_counted:
            await self._reserve(trajectory, work)
        try:
            if exchange is None:
                exchange = self._new(trajectory, work.call)
                work.take(exchange)
            async with exchange.working:
                if exchange.completion is None:
                    with _counted(trajectory, exchange.samples[0].request):
                        await self._sample(trajectory, work, exchange)
                    self._finish(trajectory, exchange)
        finally:
            if work.has_place:
                trajectory.calls.give_back()
        self.lengths.answered(work.refusals)
        if exchange.owner is work.token and exchange.completion is not None:
            trajectory.exchanges.returned(exchange)
            work.completion = exchange.completion()

    def _new(self, trajectory: _Trajectory, call: GatewayCall) -> Exchange:
        self._check_limits(trajectory)
        call, sampling = sample_call(trajectory.context, call, self._settings.sampling)
        request = self._matched(trajectory, call)
        samples = [Sample(request, number, sampling) for number in range(call.n)]
        exchange = Exchange(call.digest, samples)
        trajectory.exchanges.add(exchange)
        return exchange

    def _matched(self, trajectory: _Trajectory, call: GatewayCall) -> Request:
        previous = None
        if call.previous_id is not None:
            previous = trajectory.answered.get(call.previous_id)
            if previous is None:
                message = f"there is no answer {call.previous_id!r:.80}"
                raise GatewayError(404, "not_found", message, "previous_response_id")
        return matched(call, trajectory.tree, previous)

    def _check_limits(self, trajectory: _Trajectory) -> None:
        settings = self._settings
        if trajectory.running >= settings.max_concurrent_calls:
            limit = f"gateway.max_concurrent_calls = {settings.max_concurrent_calls}"
            raise GatewayError(403, "limit", f"{limit}: as many calls are being answered")

    async def _reserve(self, trajectory: _Trajectory, work: _Work) -> None:
        """A place among the calls that generate."""
        if not await trajectory.calls.reserve():
            source = "gateway.max_calls"
            trajectory.context.end(Outcome.LIMIT, "calls", limit_source=source)
            limit = f"{source} = {self._settings.max_calls}"
            raise GatewayError(403, "limit", f"{limit}: as many requests have generated")
        work.has_place = True

    async def _sample(self, trajectory: _Trajectory, work: _Work, exchange: Exchange) -> None:
        """Have every sample generated as far as it is missing."""
        missing = [sample for sample in exchange.samples if sample.told is None]
        for sample in missing:  # in order: trio begins tasks in any
            trajectory.context.main.check_turns()  # before a row is opened for it
            await sample.take_place(trajectory.places, trajectory.seeding)
            _count(trajectory, work, exchange)
        try:
            if len(missing) == 1:
                await missing[0].run()
            else:
                async with anyio.create_task_group() as tasks:
                    for sample in missing:
                        tasks.start_soon(sample.run)
        except BaseExceptionGroup as group:
            raise unwrap_group(group) from None

    def _finish(self, trajectory: _Trajectory, exchange: Exchange) -> None:
        """Its answers are turns of the tree from now on."""
        first = exchange.samples[0]
        request = first.request
        told = [sample.told for sample in exchange.samples if sample.told is not None]
        trajectory.heard.update(each.turn.conversation for each in told)
        nodes = [trajectory.tree.add(request.found.node, each.said, each.turn) for each in told]
        completion_id = completion_id_of(told[0].answer.id)
        if request.call.api == "responses":
            trajectory.answered[completion_id] = nodes[0]
            for node, each in zip(nodes, told, strict=True):
                node.message = given_back(each.answer)
        assert first.conversation is not None
        prefix, start = first.conversation.transcript.prefix, first.start
        answers, cached_tokens = tuple(each.answer for each in told), first.cached_tokens
        exchange.finish(
            completion_id,
            lambda: Completion(
                id=completion_id,
                answers=answers,
                prompt_ids=prefix.slice(0, start),
                cached_tokens=cached_tokens,
            ),
            [each.turn for each in told],
        )


def _count(trajectory: _Trajectory, work: _Work, exchange: Exchange) -> None:
    """It begins to generate: one call, however many samples it has and clients ask for it."""
    if work.has_place and not exchange.is_counted:
        work.has_place, exchange.is_counted = False, True
        trajectory.calls.use()


@contextmanager
def _counted(trajectory: _Trajectory, request: Request) -> Iterator[None]:
    """Its block generates for this request."""
    is_of_main = trajectory.places.is_of_main(request)
    trajectory.running += 1
    trajectory.places.main_calls += is_of_main
    try:
        yield
    finally:
        trajectory.running -= 1
        trajectory.places.main_calls -= is_of_main


def _limit_error(error: LimitExceeded, field: str) -> GatewayError:
    """A length is the agent's to deal with; any other limit ends the trajectory."""
    if error.outcome is Outcome.LENGTH:
        return GatewayError(400, "context_length", str(error), field)
    return ended_error(f"the trajectory has ended: {error}")


def _leave(trajectory: _Trajectory, work: _Work) -> None:
    """Its client is gone; unless another call has taken its exchange over."""
    if work.exchange is not None and work.exchange.owner is work.token:
        trajectory.exchanges.left(work.exchange)


def _settle(trajectory: _Trajectory) -> None:
    """End turns that were cut; rows of which nobody has read a word are not trained on."""
    for exchange in trajectory.exchanges.abandoned():
        for sample in exchange.samples:
            conversation = sample.conversation
            if conversation is not None and conversation not in trajectory.heard:
                conversation.trainable = False
    for conversation in trajectory.context.main.all():
        conversation.end_turn()
    trajectory.tree.clear()
