"""Sends images and videos that an engine asks for, in parts, behind everything else."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio
import msgspec

from rollout.engine.wire.protocol import FrameError, MediaPart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollout.engine.wire.frames import FrameStream
    from rollout.medium import Media, PlacedMedia

#: Of the content, in one frame: what a request waits for at most that comes meanwhile.
PART_BYTES = 256 * 1024
#: Of a frame, beside the content.
FRAME_BYTES = 2048


class MediaSender:
    """A queue of media, and the task that empties it.

    One part at a time is given to the connection, once all that waited there has left: requests
    that come meanwhile go before the next part. Several media take turns.

    Args:
        frames: Of the data connection.
        max_frame: Bytes of a frame.

    Attributes:
        sent_bytes: Of the contents that have been given to the connection.
    """

    def __init__(self, frames: FrameStream, max_frame: int) -> None:
        self.sent_bytes = 0
        self._frames = frames
        self._part_bytes = max(1024, min(PART_BYTES, max_frame - FRAME_BYTES))
        self._queue: deque[tuple[Media, int]] = deque()
        self._wake = anyio.Event()

    def answer(self, media: Iterable[PlacedMedia], digests: Iterable[str]) -> None:
        """Queue what the engine lacks of the media of a request.

        A request's media are here until the engine has said its last about it.

        Raises:
            FrameError: It asks for something else.
        """
        held = {placed.medium.digest: placed.medium for placed in media}
        if any(digest not in held for digest in digests):
            raise FrameError("the engine asks for media that its request does not have")
        self._queue.extend((held[digest], 0) for digest in digests)
        self._wake.set()

    async def run(self) -> None:
        """Send what is queued, until cancelled."""
        while True:
            while self._queue:
                self._send_part(*self._queue.popleft())
                await self._frames.written()
            self._wake = anyio.Event()
            await self._wake.wait()

    def _send_part(self, medium: Media, start: int) -> None:
        stop = start + self._part_bytes
        part = medium.content[start:stop]
        is_last = stop >= len(medium.content)
        self._frames.send_nowait(
            MediaPart(
                digest=medium.digest,
                content=part,
                medium=None if start else msgspec.structs.replace(medium, content=b""),
                is_last=is_last,
            )
        )
        self.sent_bytes += len(part)
        if not is_last:
            self._queue.append((medium, stop))
