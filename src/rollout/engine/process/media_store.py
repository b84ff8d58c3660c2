"""Images and videos that an engine's side keeps, so that each is sent to it once.

Loaded in engine processes: imports the standard library only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.medium import Media


class MediaStore:
    """Media of all clients by digest; the ones not used for longest go first.

    Requests under way hold theirs themselves: what goes here is missing to later ones only, whose
    client is asked for it again.

    Args:
        max_bytes: Of the contents of all of them together.

    Attributes:
        bytes: Of those that are here.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._media: OrderedDict[str, Media] = OrderedDict()
        self.bytes = 0

    def get(self, digest: str) -> Media | None:
        """One that is here."""
        medium = self._media.get(digest)
        if medium is not None:
            self._media.move_to_end(digest)
        return medium

    def put(self, medium: Media) -> None:
        """Keep one, as long as there is room."""
        if medium.digest in self._media:
            return
        self._media[medium.digest] = medium
        self.bytes += len(medium.content)
        while self.bytes > self._max_bytes:
            _, oldest = self._media.popitem(last=False)
            self.bytes -= len(oldest.content)
