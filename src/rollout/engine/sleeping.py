"""The memory of a pool's engines: released while a trainer needs it, and taken back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio

from rollout.engine.operations import FlushCache, Sleep, WakeUp
from rollout.errors import ChannelError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from rollout.engine.channel import Channel
    from rollout.engine.keeping import Replica
    from rollout.engine.operations import Operation
    from rollout.engine.requests import Requests

#: What each level of sleep releases.
TAGS_OF_LEVEL = {1: ("kv_cache",), 2: ("kv_cache", "weights")}
ALL_TAGS = TAGS_OF_LEVEL[2]


class Sleeping:
    """Puts all replicas to sleep and wakes them; requests wait meanwhile.

    Args:
        reload: Gives a replica the weights that it dropped.
        changed: Called when requests may go on.
        limit_s: How long a replica may take.

    Attributes:
        asleep: What is released now, by its tags; empty while the replicas are awake.
    """

    def __init__(
        self,
        requests: Requests,
        replicas: Collection[Replica],
        *,
        reload: Callable[[Replica, Channel], object],
        changed: Callable[[], None],
        limit_s: float,
    ) -> None:
        self.asleep: frozenset[str] = frozenset()
        self._requests = requests
        self._replicas = replicas
        self._reload = reload
        self._changed = changed
        self._limit_s = limit_s

    async def sleep(self, level: int) -> None:
        """Cut running requests off, which go on when awake, and release memory.

        Raises:
            EngineError: None of the replicas could; requests go on.
        """
        self._requests.is_held = True
        self.asleep |= frozenset(TAGS_OF_LEVEL[level])
        try:
            await self._each(partial(self._put_to_sleep, level))
        except BaseException:
            self.asleep = frozenset()
            self._go_on()
            raise

    async def wake_up(self, tags: Iterable[str]) -> None:
        """Take memory back; once all of it is, requests go on."""
        tags = tuple(tag for tag in ALL_TAGS if tag in tags and tag in self.asleep)
        if tags:
            await self._each(partial(self._wake, tags))
            self.asleep -= frozenset(tags)
        if not self.asleep:
            self._go_on()

    async def flush_cache(self) -> None:
        """Have every replica forget what it computed of earlier requests."""
        await self._each(partial(self._do, FlushCache()))

    async def bring_up(self, replica: Replica, channel: Channel) -> None:
        """A replica that starts while the others sleep sleeps too."""
        if self.asleep:
            level = 2 if "weights" in self.asleep else 1
            await channel.command(Sleep(level))

    def _go_on(self) -> None:
        self._requests.is_held = False
        self._changed()

    async def _put_to_sleep(self, level: int, replica: Replica, channel: Channel) -> None:
        await self._requests.interrupt(replica)
        await channel.command(Sleep(level))

    async def _wake(self, tags: tuple[str, ...], replica: Replica, channel: Channel) -> None:
        await channel.command(WakeUp(tags))
