"""The memory of a pool's engines: released while a trainer needs it, and taken back."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import anyio

from rollout.engine.channel.messages import FlushCache, Sleep, WakeUp
from rollout.engine.core import ALL_TAGS, TAGS_OF_LEVEL
from rollout.errors import ChannelError, EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from rollout.engine.channel.channel import Channel
    from rollout.engine.pool.replica import Replica
    from rollout.engine.pool.request_runner import RequestRunner


def check_level(level: Any) -> int:
    """Check the level of a sleep, and return it."""
    if not isinstance(level, Integral) or isinstance(level, bool) or level not in TAGS_OF_LEVEL:
        raise EngineError(f"level = {level!r:.80}; expected 1 or 2")
    return int(level)


def check_tags(tags: Any) -> tuple[str, ...]:
    """Check the tags of what is woken, and return them."""
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise EngineError(f"tags = {tags!r:.80}; expected some of {', '.join(ALL_TAGS)}")
    listed = tuple(tags)
    for tag in listed:
        if not isinstance(tag, str) or tag not in ALL_TAGS:
            raise EngineError(f"tags: {tag!r:.80}; expected {', '.join(ALL_TAGS)}")
    return listed


class MemoryManager:
    """Puts all replicas to sleep and wakes them; requests wait meanwhile."""

    def __init__(self, requests: RequestRunner, replicas: Collection[Replica]) -> None:
        self._released: frozenset[str] = frozenset()  # by tags; empty while the replicas are awake
        self._requests = requests
        self._replicas = replicas

    async def sleep(self, level: int) -> None:
        """Cut running requests off, which resume when awake, and release memory.

        Raises:
            EngineError: A replica cannot, and nothing has been cut off; or it could not, and all
                are awake, and requests resume.
        """
        for replica in self._replicas:
            fault = "" if replica.channel is None else replica.channel.info.sleep_fault(level)
            if fault:
                raise EngineError(f"{replica.name}: {fault}")
        if not self._requests.is_admission_blocked:
            self._requests.is_admission_blocked = True
            self._requests.pause_deadlines(running=True)
        self._released |= frozenset(TAGS_OF_LEVEL[level])
        try:
            await self._do_on_each(partial(_sleep, level))
        except EngineError:
            self._released = frozenset()
            try:
                await self._do_on_each(_wake_all)
            finally:
                self._resume_requests()
            raise

    async def wake_up(self, tags: Iterable[str]) -> None:
        """Take memory back; once all of it is, requests resume.

        Raises:
            EngineError: A replica cannot take back that part alone, and all sleep on; or it could
                not, and is restarted.
        """
        wanted = frozenset(tags)
        woken, rest = self._released & wanted, self._released - wanted
        for replica in self._replicas if rest else ():
            fault = "" if replica.channel is None else replica.channel.info.wake_fault(woken)
            if fault:
                raise EngineError(f"{replica.name}: {fault}")
        self._released = rest
        try:
            if woken:
                await self._do_on_each(partial(_wake, woken))
        finally:
            if not self._released:
                self._resume_requests()

    async def flush_cache(self) -> None:
        """Cut running requests off, which then go on, and have every replica forget prefixes.

        SGLang forgets nothing while requests run, and under load some always do.
        """
        await self._do_on_each(lambda r, c: r.command(c, FlushCache(), interrupts=True))

    async def bring_up(self, replica: Replica, channel: Channel) -> None:
        """Have a replica that does not serve yet release what the others have released."""
        while replica.released != self._released:  # they may wake meanwhile
            surplus = replica.released - self._released
            if surplus:
                await _wake(surplus, replica, channel)
            else:
                await _sleep(2 if "weights" in self._released else 1, replica, channel)

    def _resume_requests(self) -> None:
        if self._requests.is_admission_blocked:
            self._requests.is_admission_blocked = False
            self._requests.resume_deadlines()
        self._requests.queue.call_next()

    async def _do_on_each(self, work: Callable[[Replica, Channel], Awaitable[object]]) -> None:
        """Do it on every replica that serves, side by side."""
        errors: list[EngineError] = []

        async def do(replica: Replica, channel: Channel) -> None:
            try:
                await work(replica, channel)
            except ChannelError:
                return  # it comes back as it is to be
            except EngineError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for replica in self._replicas:
                if replica.channel is not None:
                    tasks.start_soon(do, replica, replica.channel)
        if errors:
            raise errors[0]


async def _sleep(level: int, replica: Replica, channel: Channel) -> None:
    await replica.command(channel, Sleep(level), interrupts=True)
    replica.released |= frozenset(TAGS_OF_LEVEL[level])


async def _wake(tags: frozenset[str], replica: Replica, channel: Channel) -> None:
    try:
        await replica.command(channel, WakeUp(tuple(sorted(tags))))
    except EngineError as error:
        if channel.lost_cause == "operation":
            raise EngineError(replica.add_name(str(error))) from error
        if not isinstance(error, ChannelError):
            replica.restart(channel, f"it does not wake up: {error}")
        raise
    replica.released -= tags


async def _wake_all(replica: Replica, channel: Channel) -> None:
    """Wake a replica; its refusal means that it had not been put to sleep, or it is restarted."""
    try:
        await replica.command(channel, WakeUp(ALL_TAGS))
    except EngineError as error:
        if replica.released:
            replica.restart(channel, f"it does not wake up: {error}")
    replica.released = frozenset()
