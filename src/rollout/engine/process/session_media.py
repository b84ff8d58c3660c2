"""What a client's requests name of images and videos, and the requests that wait for some.

Loaded in engine processes: imports msgspec only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.engine.process.running import Running
from rollout.engine.wire.protocol import FrameError, MediaPart
from rollout.medium import Media, PlacedMedia

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.process.media_store import MediaStore


#: Digest, start and count; see `Submit`.
MediaPlace = tuple[str, int, int]


class _Waiting(msgspec.Struct, eq=False):
    """A request whose media are not all here; what is, it holds."""

    running: Running
    places: tuple[MediaPlace, ...]
    found: dict[str, Media]


class _Arriving(msgspec.Struct, eq=False):
    """A medium of which parts have come."""

    medium: Media
    parts: list[bytes]


class SessionMedia:
    """The media of one client's requests.

    Args:
        store: Where they are kept for all clients.
        ask: Has the client send some that a request names; once for each until it has come.
    """

    def __init__(self, store: MediaStore, ask: Callable[[str, tuple[str, ...]], None]) -> None:
        self._store = store
        self._ask = ask
        self._waiting: dict[str, _Waiting] = {}
        self._wanted: dict[str, _Arriving | None] = {}  # None: asked for, and nothing has come

    def is_ready(self, running: Running, places: tuple[MediaPlace, ...]) -> bool:
        """Whether the request has its media; else `take` gives it back once it has."""
        found = {digest: self._store.get(digest) for digest, _, _ in places}
        here = {digest: medium for digest, medium in found.items() if medium is not None}
        waiting = _Waiting(running, places, here)
        if _is_complete(waiting):
            return True
        self._waiting[running.request.request_id] = waiting
        new = tuple(digest for digest in found if digest not in here | self._wanted)
        if new:
            self._wanted.update(dict.fromkeys(new))
            self._ask(running.request.request_id, new)
        return False

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request waits for media."""
        return request_id in self._waiting

    def forget(self, request_id: str) -> None:
        """A request waits no more; what it asked for may still come."""
        del self._waiting[request_id]

    def take(self, part: MediaPart) -> list[Running]:
        """A part has come; the requests that have all of their media with it.

        Raises:
            FrameError: Nobody asked for it, or it is no part that follows.
        """
        digest = part.digest
        if digest not in self._wanted:
            raise FrameError(f"a part of a medium that was not asked for: {digest[:12]!r}")
        arriving = self._wanted[digest]
        if (arriving is None) != (part.medium is not None):
            raise FrameError(f"parts of the medium {digest[:12]!r} out of their order")
        if arriving is None:
            assert part.medium is not None
            arriving = self._wanted[digest] = _Arriving(part.medium, [])
        arriving.parts.append(part.content)
        if not part.is_last:
            return []
        del self._wanted[digest]
        return self._arrived(
            msgspec.structs.replace(
                arriving.medium, content=b"".join(arriving.parts), digest=digest
            )
        )

    def _arrived(self, medium: Media) -> list[Running]:
        self._store.put(medium)
        ready = []
        for request_id, waiting in list(self._waiting.items()):
            if any(medium.digest == digest for digest, _, _ in waiting.places):
                waiting.found[medium.digest] = medium
                if _is_complete(waiting):
                    del self._waiting[request_id]
                    ready.append(waiting.running)
        return ready


def _is_complete(waiting: _Waiting) -> bool:
    """Give a request its media, where all are there."""
    if len(waiting.found) < len({digest for digest, _, _ in waiting.places}):
        return False
    waiting.running.request.media = tuple(
        PlacedMedia(waiting.found[digest], start, count) for digest, start, count in waiting.places
    )
    return True
