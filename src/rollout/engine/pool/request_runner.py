"""Runs generations: their requests are placed, sent, waited for, and made again where needed."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Literal

import anyio
import attrs

from rollout.bridge import loop_clock
from rollout.engine.core import BROKEN, INTERRUPTED, WHOLE_ANSWERS
from rollout.engine.pool.generation import Loss
from rollout.engine.pool.replica import describe_errors
from rollout.limits import cleanup_scope
from rollout.observe.events import RequestEnded, RequestPlaced
from rollout.seeds import RequestIds, split_session

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rollout.engine.pool.generation import Generation
    from rollout.engine.pool.replica import Replica
    from rollout.engine.routing import Dispatch, Router
    from rollout.limits import Clock
    from rollout.observe.event_stream import EventStream
    from rollout.observe.explanation import Wait

RecoveryPolicy = Literal["resume", "restart", "fail"]

#: After so many engine processes, or broken connections, were lost with a request of a generation
#: in flight, it fails: it may be what they die of.
MAX_LOST_PROCESSES = 3
MAX_CUTS = 20
#: Malformed answers before a generation fails.
MAX_MALFORMED = 3
#: Reasons of trajectories whose requests are not made again, whatever `scheduling.max_retries` is.
LOST_ENGINES, NO_ENGINE = "lost_engines", "no_engine"
#: The longest pause before a request that a full engine refused is sent elsewhere.
MAX_REFUSED_BACKOFF_S = 1.0
#: How long a cancelled request waits for its last answer. An engine gives it between two of its
#: steps; `rollout run` gives up on trajectories somewhat later.
LAST_ANSWER_S = 1.0
#: Between two interruptions of the requests of carried trajectories.
ABORT_AGAIN_S = 1.0


def limit_last_answer(cleanup_s: float) -> float:
    """How long a cancelled request waits, where whatever is cancelled has `cleanup_s` to end."""
    return min(LAST_ANSWER_S, cleanup_s / 2)


@attrs.define
class RecoveryCounts:
    """What was done about requests whose replica was lost.

    Attributes:
        resumed: Resumed elsewhere from the tokens that they had.
        restarted: Restarted; the tokens that they had were dropped.
        failed: Failed, because too many engines were lost with them in flight.
    """

    resumed: int = 0
    restarted: int = 0
    failed: int = 0


class WaitQueue:
    """Waiting requests by priority, and then in their order.

    The first is called when a replica has room, and calls the next one once it has looked.

    Attributes:
        is_closed: Whether waiting is over, because no replica has served for too long.
    """

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self.is_closed = False
        self._has_room = has_room
        self._waiters: list[tuple[int, int, anyio.Event]] = []  # a heap, with some that have left
        self._numbers = itertools.count()
        self._count = 0

    def __len__(self) -> int:
        """How many wait, those included that were called and have not looked yet."""
        return self._count

    async def wait(self, request: Generation) -> None:
        """Return when the request is to look for a replica.

        A caller that does not take one calls `call_next`; cancellation passes the call on.
        """
        called = request.called = anyio.Event()
        heapq.heappush(self._waiters, (-request.priority, next(self._numbers), called))
        self._count += 1
        try:
            await called.wait()
        except BaseException:
            if called.is_set():
                self.call_next()
            called.set()
            raise
        finally:
            request.called = None
            self._count -= 1

    def call_next(self) -> None:
        """Call the first one, if there is room."""
        while self._waiters:
            called = self._waiters[0][-1]
            if not called.is_set() and not self._has_room():
                return
            heapq.heappop(self._waiters)
            if not called.is_set():  # else it has left
                called.set()
                return

    def call_all(self) -> None:
        """Let all of them look, because nothing is as it was."""
        for _, _, called in self._waiters:
            called.set()
        self._waiters.clear()


class RequestRunner:
    """Runs the requests of a pool.

    Attributes:
        is_open: Whether there is a pool; requests that wait for a place after that learn so.
        is_admission_blocked: Whether none may be sent for now.
        active: Requests that have not ended, also those that wait for a place.
        queue: Those that wait.
        counts: What was done about lost ones.
    """

    def __init__(
        self,
        router: Router,
        replicas: Mapping[str, Replica],
        policy: RecoveryPolicy,
        last_answer_s: float,
        events: EventStream,
    ) -> None:
        self.is_open = self.is_admission_blocked = False
        self.active: dict[Generation, None] = {}
        self.queue = WaitQueue(lambda: not self.is_admission_blocked and router.has_room)
        self.counts = RecoveryCounts()
        self._router, self._replicas = router, replicas
        self._policy: RecoveryPolicy = policy
        self._last_answer_s = last_answer_s
        self._events = events
        self._ids = RequestIds()
        self._now, self._on_end = loop_clock(), self.end  # one method for all
        self._pauses = 0
        self._paused_s = 0.0  # of pauses that are over
        self._paused_since = 0.0

    async def run(self, request: Generation) -> None:
        """Make requests until the generation has its answer; see `EnginePool.generate`.

        Cancelled, it has the engine end the request, and waits a moment for the tokens that the
        last answer brings: they have been sampled already.
        """
        avoid: str | None = None
        request.on_end = self._on_end
        self.active[request] = None
        try:
            while True:
                await self._wait_carried(request)
                dispatch = await self._find_replica(request, avoid)
                if dispatch is None:
                    continue  # its trajectory was carried meanwhile
                replica = await self._submit(request, dispatch)
                try:
                    await request.done.wait()
                except BaseException as error:
                    is_cancelled = isinstance(error, anyio.get_cancelled_exc_class())
                    await self._abort(request, replica, is_cancelled=is_cancelled)
                    raise
                finally:
                    if self._events.is_on and request.is_running:
                        self._emit_ended(request)
                    request.is_running = False
                    replica.requests.pop(request, None)
                is_cut_off = request.finish_reason == "abort"
                if await self._is_over(request):
                    return
                is_only_one = len(self._router.replicas) == 1
                avoid = None if is_cut_off or is_only_one else dispatch.replica.name
        finally:
            request.resume()
            del self.active[request]

    async def _wait_carried(self, request: Generation) -> None:
        """Wait until its trajectory continues; that time is charged to nobody."""
        if request.clock.carried_since is not None:
            began = self._now()
            try:
                await request.clock.wait_carried()
            finally:
                request.held_s += self._now() - began

    async def _find_replica(self, request: Generation, avoid: str | None) -> Dispatch | None:
        """Find a replica, by priority where requests wait; None where the trajectory is carried."""
        request.waits_since = self._now()
        dispatch = None if self.queue else self._assign(request, avoid)
        while dispatch is None:
            if not self.is_open:
                raise request.fail("the engines are closed", reason=NO_ENGINE)
            if self.queue.is_closed:
                why = describe_errors(self._replicas.values())
                raise request.fail(f"no engine is left: {why}", reason=NO_ENGINE)
            if self._pauses:
                request.pause()
            await self.queue.wait(request)
            if request.clock.carried_since is not None:
                self.queue.call_next()
                return None
            dispatch = self._assign(request, avoid)
        self.queue.call_next()  # there may be room for the next one too
        return dispatch

    def _assign(self, request: Generation, avoid: str | None) -> Dispatch | None:
        request.placed_at = self._now()
        if self.is_admission_blocked:
            return None
        dispatch = self._router.assign(
            request.session_id,
            group_id=request.group_id,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.tokens_left,
            avoid=avoid,
        )
        return self._assign(request, None) if dispatch is None and avoid is not None else dispatch

    async def _submit(self, request: Generation, dispatch: Dispatch) -> Replica:
        """Send a request as soon as there is room, and return where; nothing, where it raises."""
        replica = self._replicas[dispatch.replica.name]
        channel = replica.channel
        assert channel is not None  # the router offers no other
        request.begin(dispatch, replica.tokens)
        try:
            await channel.wait_for_room()
            dispatch.request_id = self._ids.new()
            replica.requests[request] = None
            channel.submit_nowait(request.build_submit(self._now()), request)
            if self._events.tells_all:
                self._emit_placed(request)
        except BaseException:
            self._release(request, replica)
            request.parts, request.is_running = request.parts[:-1], False
            replica.requests.pop(request, None)
            raise
        return replica

    async def _abort(self, request: Generation, replica: Replica, *, is_cancelled: bool) -> None:
        """Have the engine end a request; wait for its last tokens where the caller is cancelled."""
        if replica.channel is not None:
            replica.channel.abort_nowait(request.request_id)
        if is_cancelled:  # else the coroutine is being closed
            with cleanup_scope(self._last_answer_s):
                await request.done.wait()
        request.is_abandoned = True

    def end(self, request: Generation) -> None:
        """The engine no longer works on a request."""
        self._release(request, self._replicas[request.replica])
        request.done.set()

    def _release(self, request: Generation, replica: Replica) -> None:
        """Count a request no more where it was."""
        dispatch, generated = request.parts[-1], None
        if request.finish_reason in WHOLE_ANSWERS and not request.is_abandoned:
            generated = dispatch.count
            replica.prompt_tokens += dispatch.prompt_tokens
            replica.cached_tokens += request.cached_tokens
        self._router.release(dispatch, generated=generated)
        if dispatch.replica.in_flight == 0:
            replica.emptied.notify()
        self.queue.call_next()

    async def _is_over(self, request: Generation) -> bool:
        """Whether the generation has its answer; returns when the next request may be made."""
        if request.finish_reason == "rejected":
            await anyio.sleep(request.refused_backoff_s)
            request.refused_backoff_s = min(2 * request.refused_backoff_s, MAX_REFUSED_BACKOFF_S)
            if not (request.parts[-1].count or request.error.startswith(BROKEN)):
                return False
            # An engine behind HTTP broke off: that counts as a connection that broke.
            request.is_lost, request.loss = True, Loss(request.error)
            request.loss.settle(is_process_lost=False)
        if request.is_lost or request.is_malformed:
            await self._count_failure(request)
            if self._policy == "fail":
                raise request.fail(request.error)
            if request.is_complete():
                return True
            self._resume_or_restart(request)
            return False
        match request.finish_reason:
            case "abort" if self._was_aborted_early(request):
                if request.is_complete():
                    return True
                field = request.sampling.find_stateful_field()
                if field:
                    request.restart(f"it was interrupted (sampling.{field})")
                return False
            case "error":
                raise request.fail(request.error or f"{request.replica}: the engine failed")
        return True

    def _was_aborted_early(self, request: Generation) -> bool:
        """Whether the abort was the driver's, or by a deadline that has been put off since."""
        is_put_off = self._now() < request.limit.ends_at != request.deadline
        return request.is_interrupted or request.error == INTERRUPTED or is_put_off

    async def _count_failure(self, request: Generation) -> None:
        """Count a lost or malformed answer, and end a generation that has had too many."""
        if request.is_malformed:
            request.malformed += 1
            if request.malformed > MAX_MALFORMED:
                raise request.fail(request.error)
        if request.loss is None:  # malformed, or never sent
            return
        request.losses += (request.loss,)
        lost, cuts = request.count_losses()
        if lost >= MAX_LOST_PROCESSES - 1 or cuts >= MAX_CUTS:  # it matters what this one is
            await request.loss.settled.wait()
            lost, cuts = request.count_losses()
        if lost >= MAX_LOST_PROCESSES or cuts >= MAX_CUTS:
            self.counts.failed += 1
            what = f"{lost} engines" if lost >= MAX_LOST_PROCESSES else f"{cuts} connections"
            reasons = "; ".join(loss.reason for loss in request.losses[-MAX_LOST_PROCESSES:])
            raise request.fail(
                f"{what} were lost with the request of {request.session_id} in flight ({reasons})",
                reason=LOST_ENGINES,
            )

    def _resume_or_restart(self, request: Generation) -> None:
        field = request.sampling.find_stateful_field()
        if field or self._policy == "restart":
            rule = f"sampling.{field}" if field else "recovery.policy"
            request.restart(f"{request.error} ({rule})")
            self.counts.restarted += 1
        else:
            request.resumes += 1
            self.counts.resumed += 1

    def pause_deadlines(self, *, running: bool) -> None:
        """Pause the clocks of trajectories until `resume_deadlines`, or until a request is sent.

        Args:
            running: For those in flight too, and not only for those that wait for a place.
        """
        if not self._pauses:
            self._paused_since = self._now()
        self._pauses += 1
        for request in self.active:
            if running or not request.is_running:
                request.pause()

    def resume_deadlines(self) -> None:
        """End one `pause_deadlines`."""
        self._pauses -= 1
        if not self._pauses:
            self._paused_s += self._now() - self._paused_since
            for request in self.active:
                request.resume()

    def paused_s(self) -> float:
        """For how long that has been so, in all."""
        return self._paused_s + (self._now() - self._paused_since if self._pauses else 0.0)

    async def interrupt_carried(self, clocks: Collection[Clock]) -> None:
        """Cut off the requests of carried trajectories; returns when none is in flight."""
        carried = set(clocks)
        requests = [each for each in self.active if each.clock in carried]
        for request in requests:
            if request.called is not None:
                request.called.set()
        while running := [each for each in requests if each.is_running]:
            for request in running:
                request.is_interrupted = True
                channel = self._replicas[request.replica].channel
                if channel is not None:
                    channel.abort_nowait(request.request_id)
            with anyio.move_on_after(ABORT_AGAIN_S):
                for request in running:
                    await request.done.wait()
                return

    def describe_waits(self, now: float) -> dict[str, list[Wait]]:
        """What each generation waits for, by the name of its trajectory's main conversation."""
        waits: dict[str, list[Wait]] = defaultdict(list)
        for request in self.active:
            trajectory, path = split_session(request.session_id)
            waits[trajectory].append(request.describe_wait(path, now))
        return waits

    def _emit_placed(self, request: Generation) -> None:
        self._events.emit(
            RequestPlaced(
                at=self._events.since_start(request.placed_at),
                trajectory=request.trajectory,
                session=request.session_id,
                request=request.request_id,
                replica=request.replica,
                queue_s=request.placed_at - request.waits_since,
            )
        )

    def _emit_ended(self, request: Generation) -> None:
        dispatch, now = request.parts[-1], self._now()
        reason: str | None = request.finish_reason
        if reason is None:
            reason = "lost" if request.is_lost else "cancelled"
            reason = "error" if request.is_malformed else reason
        first_at = now if request.first_at is None else request.first_at
        event = RequestEnded(
            at=self._events.since_start(now),
            trajectory=request.trajectory,
            session=request.session_id,
            request=dispatch.request_id,
            replica=dispatch.replica.name,
            began=self._events.since_start(request.waits_since),
            queue_s=request.placed_at - request.waits_since,
            prefill_s=first_at - request.placed_at,
            decode_s=now - first_at,
            prompt_tokens=dispatch.prompt_tokens,
            cached_tokens=request.cached_tokens if request.finish_reason else 0,
            tokens=dispatch.count,
            finish_reason=reason,
        )
        self._events.tell_event(request.trajectory, event)
