"""What of images and videos is taken, and how the faults of their readers are told."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollout.errors import MediaError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.config import MediaConfig

#: Times as many bytes as a video may have, that its frames may have once decoded.
_DECODED = 64


def check_limit(limits: MediaConfig, name: str, found: float, said: str) -> None:
    """Raise a MediaError where `found` is past a field of the section `media`; `said` names it."""
    most = getattr(limits, name)
    if found > most:
        raise MediaError(f"media.{name} = {most}: {said}")


def check_pixels(limits: MediaConfig, width: int, height: int) -> None:
    """Raise a MediaError of a picture or a frame without pixels, or of too many."""
    if width < 1 or height < 1:
        raise MediaError(f"a picture of {width} x {height} pixels; expected some")
    said = f"{width} x {height} are {width * height}"
    check_limit(limits, "max_pixels", width * height, said)


def check_decoded(limits: MediaConfig, count: int, width: int, height: int) -> None:
    """Raise a MediaError of frames that take too much memory once they are decoded."""
    size = count * width * height * 3
    check_limit(limits, "max_bytes", size / _DECODED, f"{count} frames have {size} decoded")


@contextmanager
def explain_faults(what: str) -> Iterator[None]:
    """Make a MediaError of whatever a library raises over bad content: `what`, and its words."""
    try:
        yield
    except MediaError:
        raise
    except Exception as error:
        is_bomb = type(error).__name__.startswith("DecompressionBomb")
        said = "; media.max_pixels bounds images" if is_bomb else ""
        raise MediaError(f"{what}: {type(error).__name__}: {error}"[:400] + said) from None
