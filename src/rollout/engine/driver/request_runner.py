"""Makes the requests of generations: placed, sent and waited for, again where it must be."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import anyio

from rollout.bridge import loop_clock
from rollout.engine.core import WHOLE_ANSWERS
from rollout.engine.driver.engine_events import tell_request_ended, tell_request_placed
from rollout.engine.driver.pending_request import PendingRequest
from rollout.engine.driver.recovery import NO_ENGINE, Isolation
from rollout.engine.driver.replica import last_errors
from rollout.limits import cleanup_scope
from rollout.seeds import RequestIds

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rollout.engine.channel.channel import Channel
    from rollout.engine.driver.recovery import Attempt
    from rollout.engine.driver.replica import Replica
    from rollout.engine.driver.wait_queue import Notifier, WaitQueue
    from rollout.engine.routing import Dispatch, Router
    from rollout.limits import Clock
    from rollout.observe.event_stream import EventStream

#: Seconds before a request that a full engine refused is placed again; doubled up to the second.
REFUSED_BACKOFF_S = 0.05
MAX_REFUSED_BACKOFF_S = 1.0
#: It is past that second long before; a thousand times would be no float any more.
MOST_DOUBLED = 10
#: How long a cancelled request waits for its last answer. An engine gives it between two of its
#: steps; `rollout run` gives up on trajectories somewhat later.
LAST_ANSWER_S = 1.0
#: An abort can be lost within an engine: it is sent again as often as heartbeats do.
ABORT_AGAIN_S = 1.0


def last_answer_s(cleanup_s: float) -> float:
    """How long a cancelled request waits, where whatever is cancelled has `cleanup_s` to end."""
    return min(LAST_ANSWER_S, cleanup_s / 2)


class RequestRunner:
    """Runs attempts on the replicas of a pool.

    Args:
        wait_queue: Attempts that wait for a place.
        changes: Notified when a request is known to be gone.
        last_answer_s: How long a cancelled request waits for the tokens that it has not got yet.
        events: Takes what happens to requests.

    Attributes:
        is_open: Whether there is a pool; requests that wait for a place after that learn so.
        is_admission_blocked: Whether none may be made for now.
        active: Attempts that have not ended, also those that wait for a place.
    """

    def __init__(
        self,
        router: Router,
        replicas: Mapping[str, Replica],
        wait_queue: WaitQueue,
        changes: Notifier,
        last_answer_s: float,
        events: EventStream,
    ) -> None:
        self._events = events
        self.is_open = False
        self.is_admission_blocked = False
        self._pauses = 0
        self._paused_s = 0.0  # of pauses that are over
        self._paused_since = 0.0
        self.active: dict[Attempt, None] = {}
        self._router = router
        self._replicas = replicas
        self._wait_queue = wait_queue
        self._changes = changes
        self._last_answer_s = last_answer_s
        self._ids = RequestIds()
        self._now = loop_clock()
        self._on_gone = self._released  # one for all requests

    async def run(self, attempt: Attempt) -> None:
        """Make requests until the attempt has its answer; see `EnginePool.generate`.

        Cancelled, it has the engine end the request, and waits a moment for the tokens that the
        last answer brings: they have been sampled already.
        """
        avoid: str | None = None  # every trajectory waits in this frame: its names cost each
        self.active[attempt] = None
        try:
            while True:
                if attempt.clock.carried_since is not None:
                    await self._wait_carried(attempt)
                attempt.waits_since = self._now()
                pending: PendingRequest | None = None
                dispatch = self._place_at_once(attempt, avoid, attempt.waits_since)
                if dispatch is None:
                    dispatch = await self._place(attempt, avoid)
                if dispatch is None:
                    continue  # it is carried
                channel = self._begin(attempt, dispatch)
                try:
                    if channel.is_full:
                        await self._wait_for_room(channel, dispatch)
                    pending = self._submit(channel, dispatch, attempt)
                    try:  # right here: each coroutine around this wait is one for each trajectory
                        await pending.done.wait()
                    except anyio.get_cancelled_exc_class():
                        channel.abort_nowait(pending.request_id)
                        with cleanup_scope(self._last_answer_s):
                            await pending.done.wait()
                        raise
                    except BaseException:  # closed by force, which may not be awaited in
                        channel.abort_nowait(pending.request_id)
                        raise
                    finally:
                        pending.generation = attempt.pending = None
                finally:
                    self._end(attempt, pending)
                if pending.finish_reason in WHOLE_ANSWERS or await self._is_over(attempt, pending):
                    return
                avoid = self._to_avoid(pending)
        finally:
            attempt.resume()
            del self.active[attempt]

    def pause_deadlines(self, *, running: bool) -> None:
        """Time counts for `batch_s` only until `resume_deadlines`, or until an attempt is placed.

        Args:
            running: For those in flight too, and not only for those that wait for a place.
        """
        if not self._pauses:
            self._paused_since = self._now()
        self._pauses += 1
        for attempt in self.active:
            if running or not attempt.is_running:
                attempt.pause()

    def resume_deadlines(self) -> None:
        """End one `pause_deadlines`."""
        self._pauses -= 1
        if not self._pauses:
            self._paused_s += self._now() - self._paused_since
            for attempt in self.active:
                attempt.resume()

    def paused_s(self) -> float:
        """For how long that has been so, in all."""
        return self._paused_s + (self._now() - self._paused_since if self._pauses else 0.0)

    def running_on(self, replica: Replica) -> tuple[Attempt, ...]:
        """Attempts whose request is in flight there."""
        return tuple(attempt for attempt in self.active if attempt.replica == replica.name)

    async def finish(self, replica: Replica) -> None:
        """Return when nothing is in flight there, or when it is lost; give it nothing new."""
        routed = replica.routed
        while routed is not None and routed.in_flight and replica.routed is routed:
            await self._changes.wait()

    async def interrupt(self, replica: Replica) -> None:
        """Have its requests cut off, which then resume from their tokens, and `finish`."""
        is_empty = False
        while not is_empty:
            for attempt in self.running_on(replica):
                attempt.is_interrupted = True
                if replica.channel is not None:
                    replica.channel.abort_nowait(attempt.generation.request_id)
            with anyio.move_on_after(ABORT_AGAIN_S):
                await self.finish(replica)
                is_empty = True

    async def stop(self, clocks: Collection[Clock]) -> None:
        """Have the requests of carried trajectories cut off, and return when they are."""
        carried = dict.fromkeys(clocks)
        while attempts := [each for each in self.active if each.clock in carried]:
            for attempt in attempts:
                attempt.leave_queue()
                replica = self._replicas.get(attempt.generation.replica)
                if attempt.is_running and replica is not None and replica.channel is not None:
                    attempt.is_interrupted = True
                    replica.channel.abort_nowait(attempt.generation.request_id)
            with anyio.move_on_after(ABORT_AGAIN_S):
                while any(attempt.is_running for attempt in attempts):
                    await self._changes.wait()
                return

    async def _wait_carried(self, attempt: Attempt) -> None:
        """Wait until its trajectory continues; that time is charged to nobody."""
        began = self._now()
        try:
            await attempt.clock.wait_carried()
        finally:
            attempt.generation.held_s += self._now() - began

    async def _is_over(self, attempt: Attempt, pending: PendingRequest) -> bool:
        """Whether there is to be no other request; waits until that can be made."""
        generation = attempt.generation
        if pending.is_lost or pending.is_garbled:
            if pending.is_lost:
                await self._replicas[generation.replica].loss_classified.wait()
            return not attempt.recover(pending.error, is_garbled=pending.is_garbled)
        if generation.finish_reason == "abort" and _has_more_to_come(attempt, pending):
            return not attempt.resume_interrupted()
        if generation.finish_reason == "rejected":
            backoff_s = REFUSED_BACKOFF_S * 2 ** min(attempt.failures.refusals, MOST_DOUBLED)
            attempt.note(refusals=attempt.failures.refusals + 1)
            await anyio.sleep(min(backoff_s, MAX_REFUSED_BACKOFF_S))
            return False
        if generation.finish_reason == "error":
            raise attempt.failed(pending.error or f"{generation.replica}: the engine failed")
        return True

    def _to_avoid(self, pending: PendingRequest) -> str | None:
        """The replica that is not to get the request which is made in place of this one."""
        if pending.finish_reason == "abort" or len(self._router.replicas) == 1:
            return None
        return pending.part.replica

    def _place_at_once(self, attempt: Attempt, avoid: str | None, now: float) -> Dispatch | None:
        """A place on a replica; None where it is to be waited for.

        Args:
            avoid: A replica that gets it only where no other one does.
        """
        dispatch = None if self._wait_queue else self._ask(attempt, avoid, now)
        if dispatch is not None:
            self._wait_queue.wake_next()  # there may be room for the next one too
        return dispatch

    async def _place(self, attempt: Attempt, avoid: str | None) -> Dispatch | None:
        """Wait for a place on a replica; waiting requests are served by priority.

        None where its trajectory is carried meanwhile.
        """
        dispatch: Dispatch | None = None
        if self._pauses:
            attempt.pause()
        while dispatch is None:
            if not self.is_open:
                raise attempt.failed("the engines are closed", reason=NO_ENGINE)
            has_turn = await self._wait_or_leave(attempt)
            if has_turn is None:
                return None
            if not has_turn:
                why = last_errors(self._replicas.values())
                raise attempt.failed(f"no engine is left: {why}", reason=NO_ENGINE)
            dispatch = self._ask(attempt, avoid, self._now())
        self._wait_queue.wake_next()
        return dispatch

    async def _wait_or_leave(self, attempt: Attempt) -> bool | None:
        """As the queue says; None where it was carried, which may be over by now."""
        has_turn: bool | None = None
        with anyio.CancelScope() as attempt.queue_scope:
            has_turn = await self._wait_queue.wait(attempt.priority)
        attempt.queue_scope = None
        if attempt.clock.carried_since is not None:
            if has_turn:
                self._wait_queue.wake_next()  # another one's turn
            return None
        return has_turn

    def _ask(self, attempt: Attempt, avoid: str | None, now: float) -> Dispatch | None:
        attempt.asked_at = now
        if self.is_admission_blocked:
            return None
        dispatch = self._router.assign(
            attempt.session_id,
            group_id=attempt.group_id,
            prompt_tokens=attempt.prompt_tokens,
            max_new_tokens=attempt.tokens_left,
            avoid=avoid,
            now=now,
        )
        if dispatch is None and avoid is not None:
            return self._ask(attempt, None, now)
        return dispatch

    def _begin(self, attempt: Attempt, dispatch: Dispatch) -> Channel:
        """The attempt is in flight on its replica; a suspect has that to itself at first."""
        replica = self._replicas[dispatch.replica.name]
        assert replica.channel is not None  # the router offers no other
        if attempt.is_suspect:
            self._router.isolate(replica.name)
            isolation = Isolation(attempt, partial(self._end_isolation, replica.name))
            attempt.note(isolation=isolation)
        attempt.begin_request(replica.name)
        return replica.channel

    def _end(self, attempt: Attempt, pending: PendingRequest | None) -> None:
        """It is not any more; None: nothing was sent."""
        attempt.end_request()
        self._changes.notify()
        if attempt.failures.isolation is not None:
            attempt.failures.isolation.end()
            attempt.note(isolation=None)
        if self._events.is_on:
            tell_request_ended(self._events, attempt, pending, self._now())

    async def _wait_for_room(self, channel: Channel, dispatch: Dispatch) -> None:
        try:
            await channel.wait_for_room()
        except BaseException:
            self._release(dispatch, generated=None)
            raise

    def _submit(self, channel: Channel, dispatch: Dispatch, attempt: Attempt) -> PendingRequest:
        replica, request_id = self._replicas[dispatch.replica.name], self._ids.new()
        deadline = attempt.deadline
        pending = attempt.pending = PendingRequest(
            generation=attempt.generation,
            part=attempt.generation.begin(request_id, replica.name),
            on_gone=self._on_gone,
            counts=replica.tokens,
            vocab_size=channel.info.vocab_size,
            deadline=deadline,
            dispatch=dispatch,
            media=attempt.media,
        )
        remaining_s = None if deadline == math.inf else max(0.0, deadline - self._now())
        try:
            channel.submit_nowait(attempt.submit(request_id, remaining_s), pending)
        except BaseException:  # nothing has left
            self._released(pending)
            raise
        if self._events.tells_all:
            tell_request_placed(self._events, attempt, pending)
        return pending

    def _end_isolation(self, name: str) -> None:
        self._router.end_isolation(name)
        self._wait_queue.wake_next()

    def _released(self, pending: PendingRequest) -> None:
        """The engine no longer works on a request."""
        is_whole = pending.finish_reason in WHOLE_ANSWERS
        assert pending.dispatch is not None
        if is_whole and pending.generation is not None:
            cached, prompt = pending.generation.cached_tokens, pending.dispatch.prompt_tokens
            self._replicas[pending.dispatch.replica.name].count_prompt(prompt, cached)
        self._release(pending.dispatch, generated=pending.part.count if is_whole else None)

    def _release(self, dispatch: Dispatch, generated: int | None) -> None:
        self._router.release(dispatch, generated=generated, now=self._now())
        self._wait_queue.wake_next()
        self._changes.notify()


def _has_more_to_come(attempt: Attempt, pending: PendingRequest) -> bool:
    """Whether an abort was ours, or by a deadline that has been put off since."""
    return attempt.is_interrupted or anyio.current_time() < attempt.deadline != pending.deadline
