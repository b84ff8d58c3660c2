"""Images and videos of conversations: from a message's part to tokens and tensors.

Pillow, av and NumPy are imported once something is decoded.
"""

from rollout.media.reading import decode
from rollout.medium import Media, MediaKind, PlacedMedia

__all__ = ["Media", "MediaKind", "PlacedMedia", "decode"]
