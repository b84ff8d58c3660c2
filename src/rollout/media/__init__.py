"""Images and videos of conversations: what they are, and what of them is refused.

Pillow, av and NumPy are imported once something is decoded.
"""

from rollout.media.decoding import decode
from rollout.medium import Media, MediaKind, PlacedMedia

__all__ = ["Media", "MediaKind", "PlacedMedia", "decode"]
