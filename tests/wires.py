"""A channel to an engine over memory streams that a test can cut, slow down and listen to."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
from anyio.abc import ByteStream

from rollout.engine.channel.channel import Channel, connect_channel
from rollout.engine.channel.messages import ChannelSettings, ClientExpectations, Submit
from rollout.engine.channel.server import EngineServer
from rollout.engine.core import Chunk, SamplingParams
from rollout.engine.placement.memory import MemoryByteStream, memory_stream_pair
from rollout.medium import PlacedMedia
from rollout.scopes import open_task_group

SECRET = b"s" * 32
SETTINGS = ChannelSettings()


class Wire:
    """One engine's server and the connections to it.

    Attributes:
        streams: The server's ends, in the order in which they were opened.
        is_down: New connections fail.
        connections: That the server serves now.
    """

    def __init__(self, core: Any, **options: Any) -> None:
        self.core = core
        self.streams: list[MemoryByteStream] = []
        self.is_down = False
        self.connections = 0
        self.latency_s = 0.0
        self.max_read: int | None = None
        self.server = EngineServer(core, SECRET, **options)
        self._tasks: anyio.abc.TaskGroup | None = None

    async def connect(self) -> ByteStream:
        await anyio.lowlevel.checkpoint()
        if self.is_down:
            raise anyio.BrokenResourceError
        theirs, ours = self.make_pair()
        self.streams.append(theirs)
        assert self._tasks is not None
        self._tasks.start_soon(self._serve, theirs)
        return ours

    def make_pair(self) -> tuple[MemoryByteStream, MemoryByteStream]:
        """The server's end and the client's of a connection."""
        return memory_stream_pair(latency_s=self.latency_s, max_read=self.max_read)

    async def _serve(self, stream: MemoryByteStream) -> None:
        self.connections += 1
        await self.server.serve_connection(stream)
        self.connections -= 1

    def cut(self, after: Callable[[int], int] = lambda unread: unread) -> None:
        """Break every connection; `after` says how much of what is under way still arrives."""
        for stream in self.streams:
            stream.cut(after=after)
        self.streams.clear()

    @asynccontextmanager
    async def channel(
        self,
        settings: ChannelSettings = SETTINGS,
        expectations: ClientExpectations | None = None,
    ) -> AsyncIterator[Channel]:
        """A channel; nothing is left of its session afterwards."""
        async with open_task_group() as self._tasks:
            async with self.channel_again(settings, expectations) as channel:
                yield channel
            with anyio.move_on_after(20) as scope:
                while self.connections:
                    await anyio.sleep(0.01)
            assert not scope.cancelled_caught, "the server serves a client that left"

    @asynccontextmanager
    async def channel_again(
        self,
        settings: ChannelSettings = SETTINGS,
        expectations: ClientExpectations | None = None,
    ) -> AsyncIterator[Channel]:
        """A channel beside or after the one of `channel`."""
        async with connect_channel(
            "engine-0", self.connect, SECRET, settings=settings, expectations=expectations
        ) as channel:
            yield channel


class Request:
    """A record of a request, as small as a channel allows; takes what comes.

    Attributes:
        ids: That have arrived.
        ends: Why the channel was lost, or "", for each time that it ended.
    """

    def __init__(self, media: tuple[PlacedMedia, ...] = ()) -> None:
        self.media = media
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.error = ""
        self.ends: list[str] = []
        self.done = anyio.Event()

    def take(self, chunk: Chunk) -> bool:
        """Take the ids; False where some are missing before them."""
        if chunk.ids and chunk.offset != len(self.ids):
            return False
        self.ids += array("i", chunk.ids)
        self.finish_reason, self.error = chunk.finish_reason, chunk.error
        return True

    def end(self, lost_reason: str) -> None:
        """Note it."""
        self.ends.append(lost_reason)
        self.error = self.error or lost_reason
        self.done.set()


def submit(
    channel: Channel,
    prompt: list[int],
    count: int = 4,
    *,
    request_id: str,
    remaining_s: float | None = None,
    media: tuple[PlacedMedia, ...] = (),
) -> Request:
    """Send a request."""
    request = Request(media)
    places = tuple((each.medium.digest, each.start, each.count) for each in media)
    sampling = SamplingParams(max_new_tokens=count)
    channel.submit_nowait(
        Submit(request_id, packed(prompt), sampling, "s", remaining_s=remaining_s, media=places),
        request,
    )
    return request


class Requester:
    """Makes requests with ids of their own."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._count = 0

    def submit(self, prompt: list[int], count: int = 4, **options: Any) -> Request:
        """Send a request."""
        self._count += 1
        options.setdefault("request_id", f"{self._count:032x}")
        return submit(self.channel, prompt, count, **options)

    async def generate(self, prompt: list[int], count: int = 4, **options: Any) -> list[int]:
        """Send a request and wait for its answer."""
        request = self.submit(prompt, count, **options)
        await request.done.wait()
        assert not request.error, request.error
        return request.ids


def packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def record_messages(channel: Channel) -> list[msgspec.Struct]:
    """What the channel sends from here on, as it queues it."""
    frames = channel._frames
    sent: list[msgspec.Struct] = []
    real = frames.send_nowait

    def send_nowait(message: msgspec.Struct) -> None:
        sent.append(message)
        real(message)

    frames.send_nowait = send_nowait  # type: ignore[method-assign]
    return sent
