"""Images and videos on their way to an engine: each once a connection, by its digest.

A request names the media of its prompt. The engine asks for those that it lacks, and starts the
request when they have come.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.engine.channel.messages import FrameError, MediaPart, SendMedia
from rollout.medium import Media, PlacedMedia

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.engine.channel.framing import FrameStream

#: Of the content, in one frame: what a request that comes meanwhile waits for at most.
PART_BYTES = 256 * 1024
#: Of a frame, beside the content.
FRAME_BYTES = 2048
#: That an engine caches of each connection: a thousand pictures of a megapixel.
CACHE_BYTES = 1024 * 1024 * 1024


class MediaSender:
    """The driver's side: sends media that the engine asks for, in parts.

    A part is handed to the connection once all that waited there has been written, so requests
    that come meanwhile go first. Several media take turns.

    Attributes:
        sent_bytes: Of the contents that were handed to the connection.
    """

    def __init__(self, frames: FrameStream[Any]) -> None:
        self.sent_bytes = 0
        self._frames = frames
        self._part_bytes = max(1024, min(PART_BYTES, frames.max_frame_bytes - FRAME_BYTES))
        self._queue, self._queued = anyio.create_memory_object_stream[tuple[Media, int]](math.inf)

    def queue(self, media: Iterable[PlacedMedia], digests: Iterable[str]) -> None:
        """Send what the engine lacks of the media of a request."""
        held = {placed.medium.digest: placed.medium for placed in media}
        for digest in digests:
            if digest not in held:
                raise FrameError("the engine asks for media that its request does not have")
            self._queue.send_nowait((held[digest], 0))

    async def run(self) -> None:
        """Send what is queued, until cancelled."""
        with self._queue, self._queued:
            async for medium, start in self._queued:
                stop = start + self._part_bytes
                facts = None if start else msgspec.structs.replace(medium, content=b"")
                part, is_last = medium.content[start:stop], stop >= len(medium.content)
                self._frames.send_nowait(
                    MediaPart(digest=medium.digest, content=part, medium=facts, is_last=is_last)
                )
                self.sent_bytes += len(part)
                if not is_last:
                    self._queue.send_nowait((medium, stop))
                await self._frames.wait_until_written()


class _Arrival:
    """A medium that was asked for."""

    def __init__(self) -> None:
        self.facts: Media | None = None
        self.parts: list[bytes] = []
        self.medium: Media | None = None
        self.arrived = anyio.Event()


class MediaReceiver:
    """The engine's side of one connection: asks for media, and caches them for later requests."""

    def __init__(self, frames: FrameStream[Any], cache_bytes: int) -> None:
        self._frames = frames
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[str, Media] = OrderedDict()
        self._bytes = 0
        self._arriving: dict[str, _Arrival] = {}

    async def collect(
        self, request_id: str, places: tuple[tuple[str, int, int], ...]
    ) -> tuple[PlacedMedia, ...]:
        """Return the media of a request, once all of them are there.

        Cancellation leaves what was asked for to other requests.
        """
        digests = dict.fromkeys(digest for digest, _, _ in places)
        media = {digest: self._cached[digest] for digest in digests if digest in self._cached}
        for digest in media:
            self._cached.move_to_end(digest)
        lacking = [digest for digest in digests if digest not in media]
        missing = tuple(digest for digest in lacking if digest not in self._arriving)
        self._arriving.update({digest: _Arrival() for digest in missing})
        if missing:
            self._frames.send_nowait(SendMedia(request_id, missing))
        for digest, arrival in [(digest, self._arriving[digest]) for digest in lacking]:
            await arrival.arrived.wait()
            assert arrival.medium is not None
            media[digest] = arrival.medium
        return tuple(PlacedMedia(media[digest], start, count) for digest, start, count in places)

    def take(self, part: MediaPart) -> None:
        """Take the next part of a medium."""
        digest = part.digest
        arrival = self._arriving.get(digest)
        if arrival is None:
            raise FrameError(f"a part of a medium that was not asked for: {digest[:12]!r}")
        if (arrival.facts is None) != (part.medium is not None):
            raise FrameError(f"parts of the medium {digest[:12]!r} out of their order")
        arrival.facts = arrival.facts or part.medium
        arrival.parts.append(part.content)
        if part.is_last:
            assert arrival.facts is not None
            content = b"".join(arrival.parts)
            del self._arriving[digest]
            arrival.medium = msgspec.structs.replace(arrival.facts, content=content, digest=digest)
            self._cached[digest] = arrival.medium
            self._bytes += len(content)
            while self._bytes > self._cache_bytes:
                _, oldest = self._cached.popitem(last=False)
                self._bytes -= len(oldest.content)
            arrival.arrived.set()
