"""One image or video, as a message holds it and an engine is sent it."""

from __future__ import annotations

from hashlib import sha256
from typing import Literal

import msgspec

#: Frames that were given one by one, packed without loss: see `media.video.pack_frames`.
FRAMES_MIME = "application/x-rollout-frames"

MediaKind = Literal["image", "video"]


class Media(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, weakref=True):
    """An image or a video that was checked: `rollout.media.decode` gives its pixels.

    Two are equal where their `digest` is.

    Attributes:
        kind: "image" or "video".
        content: The encoded file, as it was given; what was given in pixels, packed without loss.
        mime: What `content` is, e.g. ``image/png``.
        width, height: Of the picture or of each frame, in pixels, after EXIF's rotation.
        indices: Of a video, which of its frames the model sees, in order, from 0.
        total_frames: Of a video, how many there are.
        fps: Of a video, its frames a second, before any were left out.
        digest: SHA-256 of all that but width and height, in hexadecimal.
    """

    kind: MediaKind
    content: bytes
    mime: str
    width: int
    height: int
    indices: tuple[int, ...] = ()
    total_frames: int = 0
    fps: float = 0.0
    digest: str = ""

    def __post_init__(self) -> None:
        if not self.digest:
            msgspec.structs.force_setattr(self, "digest", self._own_digest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Media) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        frames = f", {self.frames} frames" if self.kind == "video" else ""
        size = f"{self.width}x{self.height}{frames}, {len(self.content)} bytes"
        return f"<Media {self.kind} {self.mime} {size}, {self.digest[:12]}>"

    @property
    def frames(self) -> int:
        """Frames that the model sees: 1 of an image."""
        return len(self.indices) if self.kind == "video" else 1

    @property
    def is_intact(self) -> bool:
        """Whether `digest` is that of the content; hashes it again."""
        return self.digest == self._own_digest()

    def _own_digest(self) -> str:
        facts = (self.kind, self.mime, self.indices, self.total_frames, self.fps)
        hashed = sha256(repr(facts).encode())
        hashed.update(self.content)
        return hashed.hexdigest()


class PlacedMedia(msgspec.Struct, frozen=True, array_like=True):
    """Where a medium stands in a transcript.

    Attributes:
        medium: What stands there.
        start: Position of its first placeholder id.
        count: Ids up to its last placeholder; others may stand between them (row and frame marks).
    """

    medium: Media
    start: int
    count: int
