"""A channel to an engine over memory streams that a test can cut, slow down and listen to."""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
from anyio.abc import ByteStream

from rollout.engine.core import SamplingParams
from rollout.engine.channel.channel import Channel
from rollout.engine.channel.channel import connect_channel
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.requests import Request
from rollout.engine.placement.memory import MemoryByteStream, memory_stream_pair
from rollout.engine.channel.server import EngineServer
from rollout.engine.channel.messages import ClientExpectations, Role, Submit, ChannelSettings
from rollout.scopes import open_task_group
from rollout.token_prefix import TokenPrefix

SECRET = b"s" * 32
TERMS = ChannelSettings()


class Wire:
    """One engine's server and the connections to it.

    Attributes:
        streams: The server's ends, in the order in which they were opened.
        is_down: New connections fail.
        sent: Messages of the client by role, where a test listens.
    """

    def __init__(self, core: Any, **options: Any) -> None:
        self.core = core
        self.streams: list[MemoryByteStream] = []
        self.is_down = False
        self.latency_s = 0.0
        self.max_read: int | None = None
        self.server = EngineServer(core, SECRET, **options)
        self._tasks: anyio.abc.TaskGroup | None = None

    async def connect(self) -> ByteStream:
        await anyio.lowlevel.checkpoint()
        if self.is_down:
            raise anyio.BrokenResourceError
        ours, theirs = memory_stream_pair(latency_s=self.latency_s, max_read=self.max_read)
        self.streams.append(theirs)
        assert self._tasks is not None
        self._tasks.start_soon(self.server.serve_connection, theirs)
        return ours

    def cut(self, after: Callable[[int], int] = lambda unread: unread) -> None:
        """Break every connection; `after` says how much of what is under way still arrives."""
        for stream in self.streams:
            stream.cut(after=after)
        self.streams.clear()

    @asynccontextmanager
    async def channel(
        self, terms: ChannelSettings = TERMS, facts: ClientExpectations | None = None
    ) -> AsyncIterator[Channel]:
        """A channel that runs; nothing is left of it afterwards."""
        async with open_task_group() as self._tasks:
            async with self.channel_again(terms, facts) as channel:
                yield channel
            with anyio.move_on_after(terms.reconnect_s + 20) as scope:
                while self.server._sessions:
                    await anyio.sleep(0.01)
            assert not scope.cancelled_caught, "the server keeps a session of a client that left"

    @asynccontextmanager
    async def channel_again(
        self, terms: ChannelSettings = TERMS, facts: ClientExpectations | None = None
    ) -> AsyncIterator[Channel]:
        """A channel beside the one of `channel`."""
        async with (
            connect_channel("engine-0", self.connect, SECRET, terms=terms, facts=facts) as channel,
            open_task_group() as tasks,
        ):
            tasks.start_soon(channel.run)
            try:
                yield channel
            finally:
                tasks.cancel_scope.cancel()


class Asker:
    """Makes requests with ids of their own."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.gone: list[str] = []
        self._count = 0

    def submit(
        self,
        prompt: list[int] | TokenPrefix,
        count: int = 4,
        *,
        session: str = "s",
        deadline: float = math.inf,
        request_id: str = "",
    ) -> tuple[Generation, PendingRequest]:
        self._count += 1
        prefix = prompt if isinstance(prompt, TokenPrefix) else None
        request_id = request_id or f"{self._count:032x}"
        generation = Generation()
        pending = self.channel.submit_nowait(
            Submit(
                request_id,
                b"" if isinstance(prompt, TokenPrefix) else packed(prompt),
                SamplingParams(max_new_tokens=count),
                session,
            ),
            generation,
            lambda gone: self.gone.append(gone.request_id),
            prefix=prefix,
            deadline=deadline,
        )
        return generation, pending

    async def ask(self, prompt: list[int] | TokenPrefix, count: int = 4, **options: Any) -> Any:
        generation, pending = self.submit(prompt, count, **options)
        await pending.done.wait()
        assert not pending.error, pending.error
        return generation


def packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def prefix_of(ids: list[int]) -> TokenPrefix:
    prefix = TokenPrefix()
    prefix.extend(array("i", ids))
    return prefix


def messages_of(channel: Channel, role: Role) -> list[msgspec.Struct]:
    """What the channel sends from here on, as it queues it."""
    frames = channel._frames[role]
    sent: list[msgspec.Struct] = []
    real = frames.send_nowait

    def send_nowait(message: msgspec.Struct) -> None:
        sent.append(copy.copy(message))
        real(message)

    frames.send_nowait = send_nowait  # type: ignore[method-assign]
    return sent
