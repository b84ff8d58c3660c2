"""Keeps replicas alive: each is started, served through its channel, and restarted."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.engine.channel.channel import Channel, connect_channel
from rollout.engine.channel.handshake import CONNECT_S, RefusedError
from rollout.engine.channel.messages import ChannelSettings, ClientExpectations
from rollout.engine.driver.replica import Replica
from rollout.engine.placement.placement import Placement
from rollout.errors import ChannelError, EngineError
from rollout.limits import cleanup_scope
from rollout.scopes import open_task_group, unwrap_group

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anyio.abc import TaskGroup, TaskStatus

logger = logging.getLogger("rollout.engine")

FactsGiver = Callable[[], Awaitable[ClientExpectations]]

#: The longest pause before a replica is restarted, unless the first one is longer.
MAX_BACKOFF_S = 30.0
#: The pause is the longest one long before; a thousand times would be no float any more.
MOST_DOUBLED = 30
#: A replica that served this long died of something new: its next pause is the first one again.
STABLE_S = 60.0
#: How long after its connections an engine's end may be known: one that lost only those has not
#: died.
DEATH_GRACE_S = 1.0
#: Between two attempts to connect anew.
RECONNECT_BACKOFF_S = 0.05
#: To give back what a placement keeps for a replica.
RELEASE_S = 10.0


async def nothing_known() -> ClientExpectations:
    """The facts of a driver that takes nothing for granted."""
    return ClientExpectations()


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
    terms: ChannelSettings | None
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
                if await self._serve_process(replica, task_status) >= STABLE_S:
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

    async def _serve_process(self, replica: Replica, task_status: TaskStatus[None]) -> float:
        """Start the engine and serve it, over a new connection where one breaks.

        Returns for how long it served.
        """
        name, served_s, give_up_at = replica.name, 0.0, -math.inf
        reconnect_s = (self.terms or ChannelSettings()).reconnect_s
        # The old process, if any, has ended before this begins: its context has been left.
        async with self.placement.open_replica(name, replica.spec, self.start_timeout_s) as handle:
            replica.live_in(handle)
            while True:
                timeout_s = give_up_at - anyio.current_time()
                try:
                    async with connect_channel(
                        name,
                        handle.connect,
                        handle.secret,
                        settings=self.terms,
                        expectations=await self.facts(),
                        timeout_s=timeout_s if timeout_s > 0 else CONNECT_S,
                    ) as channel:
                        served_s += await self._serve(replica, channel, handle.died, task_status)
                except ChannelError as error:
                    is_hopeless = isinstance(error.__cause__, ConnectionRefusedError | RefusedError)
                    if is_hopeless or anyio.current_time() >= give_up_at:
                        raise
                    await anyio.sleep(RECONNECT_BACKOFF_S)
                    continue
                if handle.died.is_set() or channel.lost_cause != "connection" or not reconnect_s:
                    return served_s
                give_up_at = anyio.current_time() + reconnect_s

    async def _serve(
        self, replica: Replica, channel: Channel, died: anyio.Event, task_status: TaskStatus[None]
    ) -> float:
        """Serve until the session is lost; returns for how long it served."""
        try:
            async with open_task_group() as tasks:
                tasks.start_soon(self._close_when_dead, channel, died)
                await self.bring_up(replica, channel)
                if replica.starts == 1:
                    task_status.started()
                served_since = anyio.current_time()
                await channel.lost.wait()
                served_s = anyio.current_time() - served_since
                if channel.lost_cause == "connection":
                    with anyio.move_on_after(DEATH_GRACE_S):
                        await died.wait()
        finally:
            channel.close()
            is_death = died.is_set() or channel.lost_cause != "connection"
            self.classify_loss(replica, channel, is_death)
        logger.warning("lost %s", channel.lost_reason)
        self.taken_down(replica, channel.lost_reason)
        return served_s

    async def _close_when_dead(self, channel: Channel, died: anyio.Event) -> None:
        await died.wait()
        channel.lose("the engine died", "process")
