"""Choices that are the same in every process and every run: never `random`, never `hash`.

Loaded in engine processes: imports the standard library only.
"""

from __future__ import annotations

import hashlib
import math

_BLOCK = 64
_LETTERS = b"etaoinshrdlucmfwypvbgk    "
_TO_TEXT = bytes(_LETTERS[byte % len(_LETTERS)] for byte in range(256))


def stable_key(*parts: int | str | bytes) -> bytes:
    """16 bytes that `parts` determine."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def stable_share(*parts: int | str | bytes) -> float:
    """A number in (0, 1) that `parts` determine, as good as uniform."""
    return (int.from_bytes(stable_key(*parts)[:6], "little") + 0.5) / 2**48


def stable_lognormal(median: float, sigma: float, *parts: int | str | bytes) -> float:
    """A log-normal number that `parts` determine (Box and Muller 1958)."""
    radius = math.sqrt(-2 * math.log(stable_share("radius", *parts)))
    return median * math.exp(sigma * radius * math.cos(math.tau * stable_share("angle", *parts)))


def filler_text(key: bytes, start: int, stop: int) -> bytes:
    """Printable bytes for positions [start, stop), each determined by `key` and its position.

    Lower-case letters and spaces: never the beginning of a tag or a tool call.
    """
    first, last = start // _BLOCK, -(-stop // _BLOCK)
    blocks = b"".join(
        hashlib.blake2b(block.to_bytes(8, "little"), key=key).digest()
        for block in range(first, last)
    )
    offset = start - first * _BLOCK
    return blocks[offset : offset + max(stop - start, 0)].translate(_TO_TEXT)
