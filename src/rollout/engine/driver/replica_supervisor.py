"""Keeps replicas alive: each is started, served through its channel, and restarted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.engine.driver.channel import Channel
from rollout.engine.driver.channel_connecting import connect_channel
from rollout.engine.driver.replica import Replica
from rollout.engine.placement.placement import Placement
from rollout.engine.wire.protocol import DriverFacts, Terms
from rollout.errors import EngineError
from rollout.limits import cleanup_scope
from rollout.scopes import open_task_group, unwrap_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from anyio.abc import TaskGroup, TaskStatus

logger = logging.getLogger("rollout.engine")

FactsGiver = Callable[[], Awaitable[DriverFacts]]

#: The longest pause before a replica is restarted, unless the first one is longer.
MAX_BACKOFF_S = 30.0
#: The pause is the longest one long before; a thousand times would be no float any more.
MOST_DOUBLED = 30
#: A replica that served this long died of something new: its next pause is the first one again.
STABLE_S = 60.0
#: How long after its connections an engine's end may be known: one that lost only those has not
#: died.
DEATH_GRACE_S = 1.0
#: To give back what a placement keeps for a replica.
RELEASE_S = 10.0


async def nothing_known() -> DriverFacts:
    """The facts of a driver that takes nothing for granted."""
    return DriverFacts()


@attrs.frozen(kw_only=True)
class Supervisor:
    """Starts replicas, and starts them again when they die, for as long as they are wanted.

    Attributes:
        terms: Of the channels; None takes the defaults.
        facts: Gives what the driver takes for granted of the engines.
        start_timeout_s: From the start of a replica to its answer to the hello.
        backoff_s: Pause before the first restart; doubled at each further death or failed start.
        bring_up: Makes a connected replica serve.
        classify_loss: A replica was lost: whether it died of itself is known now.
        taken_down: A replica serves no more, and why.
    """

    placement: Placement
    terms: Terms | None
    facts: FactsGiver
    start_timeout_s: float
    backoff_s: float
    bring_up: Callable[[Replica, Channel], Awaitable[None]]
    classify_loss: Callable[[Replica, Channel, bool], None]
    taken_down: Callable[[Replica, str], None]

    async def start_all(self, tasks: TaskGroup, replicas: Iterable[Replica]) -> None:
        """Return when all of them serve; `supervise` keeps them so in `tasks`.

        Raises:
            EngineError: One of them did not start.
        """
        try:
            async with anyio.create_task_group() as starting:
                for replica in replicas:
                    starting.start_soon(tasks.start, self.supervise, replica)
        except BaseExceptionGroup as group:
            error = unwrap_group(group)
        else:
            return
        raise error

    async def supervise(
        self, replica: Replica, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep one replica serving until it is removed or the pool closes.

        Raises:
            EngineError: Its first start failed. Later failures are logged, and it is tried again.
        """
        try:
            with anyio.CancelScope() as scope:
                replica.begin(scope)
                await self._supervise(replica, task_status)
        finally:
            try:
                with cleanup_scope(RELEASE_S):
                    await self.placement.release(replica.name)
            finally:
                replica.end()
                self.taken_down(replica, "")

    async def _supervise(self, replica: Replica, task_status: TaskStatus[None]) -> None:
        deaths, longest_s = 0, max(MAX_BACKOFF_S, self.backoff_s)
        while True:
            try:
                async with self._started(replica) as (channel, died):
                    if await self._serve(replica, channel, died, task_status) >= STABLE_S:
                        deaths = 0
            except EngineError as error:
                if replica.starts == 0:
                    raise
                logger.error("%s did not start again: %s", replica.name, error)
                self.taken_down(replica, str(error))
            replica.begin_restart()
            pause_s = self.backoff_s * 2 ** min(deaths, MOST_DOUBLED)
            await anyio.sleep(min(pause_s, longest_s))
            deaths += 1

    @asynccontextmanager
    async def _started(self, replica: Replica) -> AsyncIterator[tuple[Channel, anyio.Event]]:
        """The old one, if any, is gone before this begins: its context has been left."""
        name = replica.name
        async with (
            self.placement.open_replica(name, replica.spec, self.start_timeout_s) as handle,
            connect_channel(
                name,
                handle.connect,
                handle.secret,
                replica.tokens,
                terms=self.terms,
                facts=await self.facts(),
            ) as channel,
        ):
            replica.live_in(handle)
            yield channel, handle.died

    async def _serve(
        self, replica: Replica, channel: Channel, died: anyio.Event, task_status: TaskStatus[None]
    ) -> float:
        """Serve until the replica is lost; returns for how long it served."""
        try:
            async with open_task_group() as tasks:
                tasks.start_soon(self._close_when_dead, channel, died)
                tasks.start_soon(channel.run)
                await self.bring_up(replica, channel)
                if replica.starts == 1:
                    task_status.started()
                served_since = anyio.current_time()
                await channel.lost.wait()
                served_s = anyio.current_time() - served_since
                if channel.is_link_fault:
                    with anyio.move_on_after(DEATH_GRACE_S):
                        await died.wait()
        finally:
            channel.close()
            self.classify_loss(replica, channel, died.is_set() or not channel.is_link_fault)
        logger.warning("lost %s", channel.lost_reason)
        self.taken_down(replica, channel.lost_reason)
        return served_s

    async def _close_when_dead(self, channel: Channel, died: anyio.Event) -> None:
        await died.wait()
        channel.close("the engine died")
