"""The engines of a rollout: replicas kept alive, requests placed, answers gathered."""

from __future__ import annotations

import logging
import math
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import attrs
import numpy as np

from rollout.engine.channel import Channel, connect_channel
from rollout.engine.core import EngineInfo, EngineLoad, GenerationRequest, SamplingParams
from rollout.engine.generation import TokenCounts
from rollout.engine.placement.base import CoreSpec
from rollout.engine.routing import Dispatch, ReplicaState, Router
from rollout.errors import EngineError
from rollout.scopes import leaf_of, open_task_group
from rollout.seeds import RequestIds
from rollout.token_history import TokenHistory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from anyio.abc import TaskStatus

    from rollout.engine.generation import Generation
    from rollout.engine.placement.base import Placement

logger = logging.getLogger("rollout.engine")

#: Seconds before a replica that died is started again; doubled at each failure in a row.
RESTART_BACKOFF_S = 1.0
#: A replica that does not start this many times in a row is given up.
MAX_START_FAILURES = 3
#: Seconds before a request that a full engine refused is placed again; doubled up to the second.
REFUSED_BACKOFF_S = 0.05
MAX_REFUSED_BACKOFF_S = 1.0


@attrs.frozen
class ReplicaStatistics:
    """One replica now.

    Attributes:
        state: "starting", "serving", "restarting" or "given up".
        in_flight: Requests sent and not known to be gone, zombies included.
        zombies: Cancelled requests whose end is not confirmed.
        starts: How often it has been started.
        tokens: What became of the tokens that arrived from it, over all of its starts.
    """

    name: str
    state: str
    in_flight: int
    zombies: int
    starts: int
    tokens: TokenCounts = attrs.field(factory=TokenCounts)


@attrs.define(eq=False)
class _Replica:
    name: str
    spec: CoreSpec
    weight: float = 1.0
    state: str = "starting"
    starts: int = 0
    channel: Channel | None = None
    routed: ReplicaState | None = None
    tokens: TokenCounts = attrs.field(factory=TokenCounts)


class EnginePool:
    """Replicas behind a router, one for each of `specs`; made by `open_engines`.

    Args:
        weights: Shares of the load, one for each of `specs`; empty makes all equal.
    """

    def __init__(
        self,
        *,
        placement: Placement,
        specs: Sequence[CoreSpec],
        router: Router,
        start_timeout_s: float,
        weights: Sequence[float] = (),
    ) -> None:
        self._placement = placement
        self._start_timeout_s = start_timeout_s
        self._router = router
        shares = weights or (1.0,) * len(specs)
        pairs = zip(specs, shares, strict=True)
        self._replicas = [_Replica(f"engine-{i}", *pair) for i, pair in enumerate(pairs)]
        self._by_name = {replica.name: replica for replica in self._replicas}
        self._waiting: dict[anyio.Event, None] = {}
        self._request_ids = RequestIds()
        self._info: EngineInfo | None = None
        self._last_failure = ""

    @property
    def info(self) -> EngineInfo:
        """The facts that all replicas share."""
        if self._info is None:
            raise EngineError("no engine has started yet")
        return self._info

    @property
    def router(self) -> Router:
        """Who decides where requests go; its `statistics` say why."""
        return self._router

    def drain(self, name: str) -> None:
        """Send a replica nothing new until `resume`; what it has in flight goes on."""
        self._router.drain(name)

    def resume(self, name: str) -> None:
        """End `drain`."""
        self._router.resume(name)
        self._wake_one()

    def statistics(self) -> tuple[ReplicaStatistics, ...]:
        """A snapshot of every replica."""
        return tuple(
            ReplicaStatistics(
                name=replica.name,
                state=replica.state,
                in_flight=replica.routed.in_flight if replica.routed else 0,
                zombies=replica.channel.zombies if replica.channel else 0,
                starts=replica.starts,
                tokens=attrs.evolve(replica.tokens),
            )
            for replica in self._replicas
        )

    def loads(self) -> dict[str, EngineLoad]:
        """What each serving engine last said it was doing, by replica."""
        return {r.name: r.channel.load for r in self._replicas if r.channel is not None}

    @property
    def tokens_under_way(self) -> int:
        """Tokens that have arrived for requests that have not ended."""
        return sum(r.channel.tokens_under_way for r in self._replicas if r.channel is not None)

    async def generate(
        self,
        generation: Generation,
        *,
        session_id: str,
        prompt_ids: bytes | TokenHistory,
        sampling: SamplingParams,
        priority: int = 0,
        group_id: str = "",
        deadline: float = math.inf,
    ) -> None:
        """Run one request to its end; `generation` fills as tokens come.

        Cancellation keeps in `generation` what had arrived, and has the engine end the request.

        Args:
            session_id: The trajectory; its requests stay on one replica while that serves well.
            prompt_ids: int32 little-endian, packed; or the trajectory's history, of which only
                what the replica does not have is sent.
            group_id: Trajectories that begin with the same prompt; "" for one on its own.
            deadline: Clock time at which the engine ends the request by itself.

        Raises:
            EngineError: The request is refused for good, the engine failed or was lost, or no
                engine is left.
        """
        history = prompt_ids if isinstance(prompt_ids, TokenHistory) else None
        packed = prompt_ids if isinstance(prompt_ids, bytes) else b""
        prompt_tokens = len(packed) // 4 if history is None else len(history)
        self._check_ids(packed, history)
        backoff_s, avoid = REFUSED_BACKOFF_S, None
        ask = partial(
            self._router.assign,
            session_id,
            group_id=group_id,
            prompt_tokens=prompt_tokens,
            max_new_tokens=sampling.max_new_tokens,
        )
        while True:
            dispatch, channel = await self._place(ask, avoid)
            request = GenerationRequest(
                request_id=self._request_ids.new(),
                prompt_ids=packed,
                sampling=sampling,
                session_id=session_id,
                priority=priority,
            )
            on_gone = partial(self._released, dispatch, generation)
            pending = await channel.submit(
                request, generation, on_gone, history=history, deadline=deadline
            )
            try:
                await pending.done.wait()
            except BaseException:
                channel.abandon_nowait(pending)
                raise
            if generation.finish_reason == "rejected":
                await anyio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_REFUSED_BACKOFF_S)
                avoid = channel.name if len(self._router.replicas) > 1 else None
                generation.clear()
                continue
            if generation.finish_reason == "error":
                raise EngineError(pending.error or f"{channel.name}: the engine failed")
            return

    def forget(self, session_id: str) -> None:
        """The trajectory has ended; nothing is kept for it."""
        self._router.forget(session_id)

    def _check_ids(self, prompt_ids: bytes, history: TokenHistory | None) -> None:
        """An id outside the vocabulary can kill an engine; it does not leave the driver."""
        start = 0 if history is None else history.checked
        data = prompt_ids if history is None else history.packed(start)
        ids = np.frombuffer(data, dtype=np.int32)
        # Negative ones are the largest as unsigned.
        if len(ids) and ids.view(np.uint32).max() >= self.info.vocab_size:
            bad = (ids < 0) | (ids >= self.info.vocab_size)
            at = start + int(np.argmax(bad))
            raise EngineError(
                f"token id {ids[at - start]} at position {at} is outside the engine's "
                f"vocabulary of {self.info.vocab_size} ids"
            )
        if history is not None:
            history.checked = start + len(ids)

    async def _place(
        self, ask: Callable[..., Dispatch | None], avoid: str | None
    ) -> tuple[Dispatch, Channel]:
        """Wait for a place on a replica; those who wait are served in their order."""
        dispatch = None if self._waiting else ask(avoid=avoid, now=anyio.current_time())
        while dispatch is None:
            self._check_hope()
            turn = anyio.Event()
            self._waiting[turn] = None
            try:
                await turn.wait()
            except BaseException:
                if turn in self._waiting:
                    del self._waiting[turn]
                else:
                    self._wake_one()  # the turn was given to us; pass it on
                raise
            now = anyio.current_time()
            dispatch = ask(avoid=avoid, now=now) or ask(now=now)
        self._wake_one()  # there may be room for the next one too
        channel = self._by_name[dispatch.replica.name].channel
        assert channel is not None
        return dispatch, channel

    def _check_hope(self) -> None:
        if all(replica.state == "given up" for replica in self._replicas):
            raise EngineError(f"no engine is left: {self._last_failure}")

    def _released(self, dispatch: Dispatch, generation: Generation) -> None:
        is_whole = generation.finish_reason in ("stop", "length")
        generated = len(generation.ids) if is_whole else None
        self._router.release(dispatch, generated=generated, now=anyio.current_time())
        self._wake_one()

    def _wake_one(self) -> None:
        if self._waiting and self._router.has_room:
            turn = next(iter(self._waiting))
            del self._waiting[turn]
            turn.set()

    def _wake_all(self) -> None:
        for turn in self._waiting:
            turn.set()
        self._waiting.clear()

    async def keep(
        self, replica: _Replica, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep one replica serving: start it, and start it again when it dies.

        Raises:
            EngineError: Its first start failed. Later failures are logged and counted.
        """
        failures = 0
        while True:
            try:
                async with self._started(replica) as (channel, died):
                    failures = 0
                    if replica.starts == 1:
                        task_status.started()
                    await self._serve(replica, channel, died)
            except EngineError as error:
                if replica.starts == 0:
                    raise
                failures += 1
                self._last_failure = str(error)
                logger.error("%s did not start again: %s", replica.name, error)
            if failures == MAX_START_FAILURES:
                replica.state = "given up"
                self._wake_all()
                return
            replica.state = "restarting"
            await anyio.sleep(RESTART_BACKOFF_S * 2**failures)

    @asynccontextmanager
    async def _started(self, replica: _Replica) -> AsyncIterator[tuple[Channel, anyio.Event]]:
        name = replica.name
        async with (
            self._placement.open_replica(name, replica.spec, self._start_timeout_s) as handle,
            connect_channel(name, handle.connect, handle.secret, replica.tokens) as channel,
        ):
            if self._info is None:
                self._info = channel.info
            elif channel.info.fingerprint != self._info.fingerprint:
                raise EngineError(
                    f"{name} serves model {channel.info.fingerprint}, the other engines "
                    f"{self._info.fingerprint}"
                )
            replica.starts += 1
            yield channel, handle.died

    async def _serve(self, replica: _Replica, channel: Channel, died: anyio.Event) -> None:
        replica.channel = channel
        replica.state = "serving"
        replica.routed = self._router.add(
            replica.name,
            channel.info.max_requests,
            weight=replica.weight,
            weight_version=channel.info.weight_version,
            now=anyio.current_time(),
        )
        # At once, so that no request is sent to a replica that is known to be lost.
        channel.on_lost = lambda: self._router.remove(replica.name)
        channel.on_load = lambda load: self._router.report(
            replica.name, load, now=anyio.current_time()
        )
        self._wake_one()
        try:
            async with open_task_group() as tasks:
                tasks.start_soon(self._close_when_dead, channel, died)
                await channel.run()
        finally:
            channel.close()
            replica.channel = replica.routed = None
        logger.warning("lost %s", channel.lost_reason)
        self._last_failure = channel.lost_reason

    async def _close_when_dead(self, channel: Channel, died: anyio.Event) -> None:
        await died.wait()
        channel.close("the engine died")

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start every replica side by side; returns when all serve."""
        try:
            async with anyio.create_task_group() as starting:
                for replica in self._replicas:
                    starting.start_soon(tasks.start, self.keep, replica)
        except BaseExceptionGroup as group:
            error = leaf_of(group)
        else:
            return
        raise error


@asynccontextmanager
async def open_pool(pool: EnginePool) -> AsyncIterator[EnginePool]:
    """The pool with all of its replicas serving; they are gone when the block has been left."""
    async with open_task_group() as tasks:
        await pool.start(tasks)
        yield pool
