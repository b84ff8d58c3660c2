"""The memory of a pool's engines: released while a trainer needs it, and taken back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio

from rollout.engine.wire.operations import ALL_TAGS, TAGS_OF_LEVEL, FlushCache, Sleep, WakeUp
from rollout.errors import ChannelError, EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable

    from rollout.engine.driver.channel import Channel
    from rollout.engine.driver.replica import Replica
    from rollout.engine.driver.request_runner import RequestRunner

    Work = Callable[[Replica, Channel], Awaitable[None]]


class MemoryManager:
    """Puts all replicas to sleep and wakes them; requests wait meanwhile.

    Args:
        changed: Called when requests may resume.
        limit_s: How long a replica may take.

    Attributes:
        asleep: What is released now, by its tags; empty while the replicas are awake.
    """

    def __init__(
        self,
        requests: RequestRunner,
        replicas: Collection[Replica],
        *,
        changed: Callable[[], None],
        limit_s: float,
    ) -> None:
        self.asleep: frozenset[str] = frozenset()
        self._requests = requests
        self._replicas = replicas
        self._changed = changed
        self._limit_s = limit_s

    async def sleep(self, level: int) -> None:
        """Cut running requests off, which resume when awake, and release memory.

        Raises:
            EngineError: A replica cannot, and nothing has been cut off; or it could not, and all
                are awake, and requests resume.
        """
        if level not in TAGS_OF_LEVEL:
            raise EngineError(f"level = {level!r}; expected 1 or 2")
        for replica in self._replicas:
            channel = replica.channel
            if channel is not None and channel.info.capabilities.no_sleep:
                raise EngineError(f"{replica.name}: {channel.info.capabilities.no_sleep}")
        if not self._requests.is_admission_blocked:
            self._requests.is_admission_blocked = True
            self._requests.pause_deadlines(running=True)
        self.asleep |= frozenset(TAGS_OF_LEVEL[level])
        try:
            await self._each(partial(self._put_to_sleep, level))
        except EngineError:
            self.asleep = frozenset()
            await self._each(_wake_all)
            self._resume_requests()
            raise

    async def wake_up(self, tags: Iterable[str]) -> None:
        """Take memory back; once all of it is, requests resume.

        Raises:
            EngineError: A replica could not; it is restarted.
        """
        wanted = frozenset(tags)
        unknown = sorted(wanted - frozenset(ALL_TAGS))
        if unknown:
            raise EngineError(f"tags: {unknown[0]!r}; expected {', '.join(ALL_TAGS)}")
        woken, self.asleep = self.asleep & wanted, self.asleep - wanted
        try:
            if woken:
                await self._each(partial(_wake, tuple(sorted(woken))))
        finally:
            if not self.asleep:
                self._resume_requests()

    async def flush_cache(self) -> None:
        """Have every replica forget what it computed of earlier requests.

        Raises:
            EngineError: A replica could not.
        """
        await self._each(_flush)

    async def bring_up(self, channel: Channel) -> None:
        """A replica that starts while the others sleep sleeps too."""
        released: frozenset[str] = frozenset()
        while released != self.asleep:  # they may wake meanwhile
            wanted = self.asleep
            if released - wanted:
                await channel.command(WakeUp(tuple(sorted(released - wanted))))
            else:
                await channel.command(Sleep(2 if "weights" in wanted else 1))
            released = wanted

    def _resume_requests(self) -> None:
        if self._requests.is_admission_blocked:
            self._requests.is_admission_blocked = False
            self._requests.resume_deadlines()
        self._changed()

    async def _put_to_sleep(self, level: int, replica: Replica, channel: Channel) -> None:
        await self._requests.interrupt(replica)
        await channel.command(Sleep(level))

    async def _each(self, work: Work) -> None:
        """Do it on every replica that serves, side by side.

        Raises:
            EngineError: One of them could not, or took too long and is restarted.
        """
        errors: list[EngineError] = []
        async with anyio.create_task_group() as tasks:
            for replica in self._replicas:
                channel = replica.channel
                if channel is not None and replica.is_serving:
                    tasks.start_soon(self._one, work, replica, channel, errors)
        if errors:
            raise errors[0]

    async def _one(
        self, work: Work, replica: Replica, channel: Channel, errors: list[EngineError]
    ) -> None:
        """`channel` is that by which it served: it may be removed before this task begins."""
        try:
            with anyio.fail_after(self._limit_s):
                await work(replica, channel)
        except ChannelError:
            return  # it comes back as it is to be
        except TimeoutError:
            why = f"{replica.name}: no answer after engine.start_timeout_s = {self._limit_s:g} s"
            replica.restart(channel, why)
            errors.append(EngineError(why))
        except EngineError as error:
            errors.append(error)


async def _wake(tags: tuple[str, ...], replica: Replica, channel: Channel) -> None:
    try:
        await channel.command(WakeUp(tags))
    except EngineError as error:
        replica.restart(channel, f"it does not wake up: {error}")
        raise


async def _wake_all(replica: Replica, channel: Channel) -> None:
    """A replica that cannot wake up never slept."""
    try:
        await channel.command(WakeUp(ALL_TAGS))
    except ChannelError:
        raise
    except EngineError:
        return


async def _flush(replica: Replica, channel: Channel) -> None:
    await channel.command(FlushCache())
